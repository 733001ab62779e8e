//! The `mojim` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    mojim_cli::main()
}
