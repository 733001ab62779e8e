"""Makes _abi.py, and puts libmojim.so into the wheel, which is for x86-64 Linux and any Python 3 therefore.

The library is the one of MOJIM_LIBRARY, or target/release/libmojim.so, which
`cargo build --release -p mojim-c` makes.
"""

import os
import sys
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    def initialize(self, version, build_data):
        sys.path.insert(0, self.root)
        import declarations

        declarations.make()
        if version == "editable":
            return
        top = os.path.join(self.root, "..", "..")
        library = os.environ.get("MOJIM_LIBRARY") or os.path.join(
            top, "target", "release", "libmojim.so"
        )
        if not os.path.exists(library):
            raise FileNotFoundError(f"{library}: build it by cargo build --release -p mojim-c")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append("src/mojim/_abi.py")
        build_data["force_include"][os.path.abspath(library)] = "mojim/libmojim.so"
