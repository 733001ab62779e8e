//! The settings that `mojim run` has made for this process, and where the volume's files are.
//!
//! Owns what is known of the configuration. libmojim reads it.
//!
//! Invariant: what was found once does not change, whatever the program does to its environment. A
//! thing that could not be found is looked for again.

use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::api::{self, api};
use crate::inside::starting;
use crate::real;

pub fn setting(name: &str) -> Option<CString> {
    use std::os::unix::ffi::OsStringExt;
    CString::new(std::env::var_os(name)?.into_vec()).ok()
}

pub fn or_null(s: &Option<CString>) -> *const c_char {
    s.as_ref().map_or(std::ptr::null(), |s| s.as_ptr())
}

/// What the environment names, and the directory of that volume.
pub struct Settings {
    pub config: Option<CString>,
    pub node: Option<CString>,
    pub volume: Option<CString>,
    directory: PathBuf,
}

/// The settings. While they cannot be read, a volume's path cannot be told from any
/// other: the call fails, and the next call tries again.
pub fn settings() -> Result<&'static Settings, c_int> {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    if let Some(known) = SETTINGS.get() {
        return Ok(known);
    }
    // Without the lock `starting`: this registers the engine's fork handlers, which may
    // have to wait for a fork, and a fork waits for that lock.
    let read = read_settings()?;
    let _held = starting();
    Ok(SETTINGS.get_or_init(|| read))
}

fn read_settings() -> Result<Settings, c_int> {
    use std::os::unix::ffi::OsStringExt;
    let (config, node) = (setting("MOJIM_CONFIG"), setting("MOJIM_NODE"));
    let volume = setting("MOJIM_VOLUME").filter(|v| !v.is_empty());
    let api = api()?;
    let mut dir = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: C strings, and the buffer's own length.
    let n = unsafe {
        (api.mojim_directory)(
            or_null(&config),
            or_null(&node),
            or_null(&volume),
            dir.as_mut_ptr().cast(),
            dir.len(),
        )
    };
    let Ok(n) = usize::try_from(n) else {
        let errno = real::errno();
        real::say(&format!(
            "{}; without its configuration this program can open no file",
            api::last_error(api)
        ));
        return Err(errno);
    };
    dir.truncate(n);
    Ok(Settings {
        config,
        node,
        volume,
        directory: std::ffi::OsString::from_vec(dir).into(),
    })
}

/// Where processes of the node that share the volume keep their locks.
pub fn locks_directory() -> Result<CString, c_int> {
    let (s, api) = (settings()?, api()?);
    let mut dir = vec![0u8; libc::PATH_MAX as usize];
    let (config, node, volume) = (or_null(&s.config), or_null(&s.node), or_null(&s.volume));
    // SAFETY: C strings, and the buffer's own length.
    let n = unsafe { (api.mojim_locks)(config, node, volume, dir.as_mut_ptr().cast(), dir.len()) };
    dir.truncate(usize::try_from(n).map_err(|_| api::failed(api))?);
    CString::new(dir).map_err(|_| libc::EINVAL)
}

/// The volume's directory, as configured and, if it is there, without symbolic links.
pub fn directory() -> Result<(PathBuf, Option<PathBuf>), c_int> {
    static CANONICAL: OnceLock<PathBuf> = OnceLock::new();
    let dir = &settings()?.directory;
    let canonical = match CANONICAL.get() {
        Some(c) => Some(c.clone()),
        None => {
            let found = std::fs::canonicalize(dir).ok();
            let _held = starting();
            found.map(|c| CANONICAL.get_or_init(|| c).clone())
        }
    };
    Ok((dir.clone(), canonical))
}
