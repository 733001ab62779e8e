//! The program `mojim-bench`: `mojim bench` and `mojim demo`.

use std::process::ExitCode;

fn main() -> ExitCode {
    mojim_bench::words::main()
}
