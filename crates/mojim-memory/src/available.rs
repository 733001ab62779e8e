//! How much memory this process can still get: what the system says is available,
//! but no more than the process's memory cgroups leave.
//!
//! Source: Linux `Documentation/admin-guide/cgroup-v2.rst` and
//! `cgroup-v1/memory.rst`, proc(5). An estimate, for refusing what cannot fit.

use std::path::Path;

use mojim_env::descriptors;

/// Bytes of memory and swap that are available; None if the system does not tell.
pub fn memory() -> Option<u64> {
    let system = meminfo(&descriptors::read("/proc/meminfo").ok()?)?;
    let own = descriptors::read("/proc/self/cgroup").unwrap_or_default();
    Some(system.min(cgroups(&own, Path::new("/sys/fs/cgroup"))))
}

fn meminfo(text: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some((field("MemAvailable:")? + field("SwapFree:")?) << 10)
}

/// The least that is left in any cgroup from this process's up to the root.
fn cgroups(own: &str, mounts: &Path) -> u64 {
    let mut least = u64::MAX;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(kinds), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let roots = match kinds {
            "" => vec![mounts.to_owned(), mounts.join("unified")],
            k if k.split(',').any(|k| k == "memory") => vec![mounts.join(k)],
            _ => continue,
        };
        for root in roots {
            let all = Path::new(path.trim_start_matches('/')).ancestors();
            least = all.map(|dir| left(&root.join(dir))).fold(least, u64::min);
        }
    }
    least
}

/// What is left in one cgroup; file pages count as free, since they are reclaimed
/// first.
fn left(dir: &Path) -> u64 {
    let read = |name: &str| descriptors::read(dir.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let version2 = ["memory.max", "memory.current", ""];
    // The `total_` fields include the cgroups below, as the usage does.
    let version1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_"];
    for [limit, usage, prefix] in [version2, version1] {
        let (Some(limit), Some(usage)) = (number(limit), number(usage)) else {
            continue; // no limit ("max"), or no such cgroup to see
        };
        let stat = read("memory.stat").unwrap_or_default();
        let field = |name: &str| {
            let of = |l: &str| {
                l.strip_prefix(prefix)?
                    .strip_prefix(name)?
                    .parse::<u64>()
                    .ok()
            };
            stat.lines().find_map(of).unwrap_or(0)
        };
        let files = field("inactive_file ") + field("active_file ");
        return limit.saturating_sub(usage.saturating_sub(files));
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_cgroup_counts() {
        let dir = std::env::temp_dir().join(format!("mojim-cgroups-{}", std::process::id()));
        let put = |path: &str, text: &str| {
            let path = dir.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("a/b/memory.max", "max\n");
        put("a/b/memory.current", "500\n");
        put("a/memory.max", "1000\n");
        put("a/memory.current", "900\n");
        put(
            "a/memory.stat",
            "anon 1\ninactive_file 300\nactive_file 50\n",
        );
        assert_eq!(cgroups("0::/a/b\n", &dir), 450);
        assert_eq!(cgroups("0::/\n", &dir), u64::MAX);
        assert_eq!(cgroups("nothing\n3:cpu:/a\n", &dir), u64::MAX);
        put("memory/c/memory.limit_in_bytes", "800\n");
        put("memory/c/memory.usage_in_bytes", "700\n");
        put(
            "memory/c/memory.stat",
            "active_file 9\ntotal_inactive_file 100\ntotal_active_file 0\n",
        );
        assert_eq!(cgroups("4:memory:/c/d\n0::/a\n", &dir), 200);
        std::fs::remove_dir_all(&dir).unwrap();
        let text = "MemTotal: 9 kB\nMemAvailable:   1024 kB\nSwapFree: 8 kB\n";
        assert_eq!(meminfo(text), Some(1032 << 10));
        assert_eq!(meminfo("MemTotal: 9 kB\n"), None);
        assert!(memory().is_some_and(|m| m > 0));
    }
}
