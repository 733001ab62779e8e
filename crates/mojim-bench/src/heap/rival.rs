//! jemalloc, as `malloc` of a process of its own.
//!
//! It needs more of a thread's static memory than is left when a program has started. So it is
//! loaded before (LD_PRELOAD).
//!
//! The process is this program again. It reads a case a line, has one turn at it, and writes the
//! nanoseconds. So its turns lie between those of the others.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::allocator::Allocator;
use super::turns::{Case, Turns};
use crate::library::function;

/// Whose times they are.
pub const NAME: &str = "jemalloc";
const LIBRARY: &str = "libjemalloc.so.2";
/// The option of the process.
const SERVE: &str = "--serve";
const READY: &str = "ready";

/// A process that ends with its starter.
pub struct Rival {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Rival {
    /// Starts it; `None` if the system does not have the library.
    pub fn start() -> Option<Rival> {
        let mut child = Command::new(std::env::current_exe().ok()?)
            .args(["heap", SERVE])
            .env("LD_PRELOAD", LIBRARY)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let (to, from) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
        let mut rival = Rival { child, to, from };
        (rival.line().ok()? == READY).then_some(rival)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        Ok(line.trim().into())
    }

    /// One turn; nanoseconds for each request.
    pub fn turn(&mut self, case: Case) -> io::Result<f64> {
        let mixed = u8::from(case.mixed);
        writeln!(self.to, "{mixed} {} {}", case.threads, case.ops)?;
        self.line()?.parse().map_err(io::Error::other)
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        // It may have ended already; either way it is waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process itself, until its input ends.
pub fn serve() -> io::Result<()> {
    // SAFETY: these are the types of these functions; jemalloc alone has the third.
    let allocator = unsafe {
        let _: unsafe extern "C" fn() = function(libc::RTLD_DEFAULT, c"mallctl")?;
        let malloc = function(libc::RTLD_DEFAULT, c"malloc")?;
        Allocator::Plain(malloc, function(libc::RTLD_DEFAULT, c"free")?)
    };
    let mut out = io::stdout().lock();
    writeln!(out, "{READY}")?;
    out.flush()?;
    let mut last: Option<(Case, Turns)> = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Result<Vec<usize>, _> = line.split(' ').map(str::parse).collect();
        let Ok(&[mixed, threads, ops]) = words.as_deref() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let case = Case {
            mixed: mixed != 0,
            threads,
            ops,
        };
        let turns = match &mut last {
            Some((of, turns)) if *of == case => turns,
            _ => &mut last.insert((case, Turns::new(allocator, case))).1,
        };
        writeln!(out, "{}", turns.turn()?)?;
        out.flush()?;
    }
    Ok(())
}
