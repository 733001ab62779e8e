//! The programs that lie beside this one: `mojim-bench`, which is what `mojim bench` and `mojim demo`
//! start, and `mojim`, which that one starts. So the command, of which each node has one, contains no
//! measurement and nothing of what is measured beside it.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::failure::{Done, Failure};

const BENCH: &str = "mojim-bench";

/// The words that a command of `mojim-bench` gets. That program reads them.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Words {
    /// A measurement and its options. `--help` lists them.
    #[arg(
        value_name = "WORDS",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    words: Vec<OsString>,
}

impl Words {
    /// Becomes `mojim-bench`, with `before` before these words.
    pub fn run(self, before: &[&str]) -> Done {
        let before = before.iter().map(OsString::from);
        run_bench(before.chain(self.words))
    }
}

/// Becomes `mojim-bench` with these words; returns only if that fails.
pub fn run_bench(words: impl IntoIterator<Item = OsString>) -> Done {
    let bench = beside(BENCH)?;
    let e = Command::new(&bench).args(words).exec();
    Err(Failure::failed(format!(
        "starting {}: {e}",
        bench.display()
    )))
}

/// The same with this process's own words, if that program is there; else nothing.
pub fn become_bench_if_there() -> Result<(), Failure> {
    match beside(BENCH) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e.into()),
        Ok(_) => run_bench(std::env::args_os().skip(1)).map(drop),
    }
}

/// The command `mojim`, of a program that lies beside it.
pub fn mojim() -> io::Result<PathBuf> {
    beside("mojim")
}

/// Where the program `name` lies, beside this one.
fn beside(name: &str) -> io::Result<PathBuf> {
    let this = std::env::current_exe()?;
    let path = this.with_file_name(name);
    match path.try_exists() {
        Ok(true) => Ok(path),
        Ok(false) => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!(
                "there is no {}: this needs the program {name}, which belongs in the directory of {}",
                path.display(),
                this.file_name().unwrap_or_default().display()
            ),
        )),
        Err(e) => Err(io::Error::new(e.kind(), format!("{}: {e}", path.display()))),
    }
}
