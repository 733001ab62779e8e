//! `mojim completions` and `mojim man`: what is generated from the command line's
//! own description.

use std::io::Write;
use std::path::PathBuf;

use clap_complete::Shell;

use crate::failure::{Done, Failure};

/// Print completions for a shell.
#[derive(clap::Args)]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    /// Prints them.
    pub fn run(self, mut command: clap::Command) -> Done {
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, "mojim", &mut text);
        std::io::stdout().write_all(&text)?;
        Ok(0)
    }
}

/// Write the manual pages, one for each command, into a directory.
#[derive(clap::Args)]
pub struct Man {
    /// The directory for the pages. The command makes it if it is missing.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

impl Man {
    /// Writes them.
    pub fn run(self, command: clap::Command) -> Done {
        std::fs::create_dir_all(&self.directory)
            .and_then(|()| clap_mangen::generate_to(command, &self.directory))
            .map_err(|e| Failure::failed(format!("{}: {e}", self.directory.display())))?;
        Ok(0)
    }
}
