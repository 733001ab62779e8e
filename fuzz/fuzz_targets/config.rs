//! Any text as a configuration: an answer or a list of mistakes, never a panic.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use mojim_config::Config;

fuzz_target!(|text: &str| {
    let path = Path::new("fuzz.toml");
    match Config::parse(text, path) {
        Ok(c) => {
            for v in c.volumes.values() {
                // Whatever was accepted names nodes that are there.
                c.node(&v.primary).expect("the primary is a node");
                if let Some(m) = &v.mirror {
                    c.node(m).expect("the mirror is a node");
                }
            }
            let _ = c.volume(None);
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
});
