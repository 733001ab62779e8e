//! A machine whose log is on an emulated memory.
//!
//! Owns the environment in whose place the engine runs. All but the log's memory is the machine's own.
//!
//! Invariant: what takes the place of persistent memory has the name and the life of memory that is
//! lost with the machine's power.

use std::io;
use std::path::Path;
use std::sync::Arc;

use mojim_config::Node;
use mojim_env::{Env, File, Memory, OpenHow};
use mojim_linux::Os;

use crate::emulator::{Emulator, Stores};
use crate::machine::Machine;
use crate::model::Model;

/// What a node's log emulates: one memory for all volumes of a process.
#[derive(Clone, Default)]
pub struct Emulated(Option<Arc<Emulator>>);

impl Emulated {
    /// What this node's configuration names. For a memory this measures the machine, which takes
    /// some 0.3 s.
    pub fn of(node: &Node) -> Emulated {
        Emulated(node.log.emulate.map(|memory| {
            let model = Model::named(memory.as_str()).expect("each word has a model");
            Arc::new(Emulator::new(model, Machine::measured()))
        }))
    }

    /// The machine's own environment or, where a memory is emulated, one over it.
    pub fn over(&self, os: Os) -> Arc<dyn Env> {
        match &self.0 {
            None => Arc::new(os),
            Some(emulator) => Arc::new(Over {
                os,
                emulator: emulator.clone(),
            }),
        }
    }
}

/// A machine, with an emulated memory in the place of persistent memory.
struct Over {
    os: Os,
    emulator: Arc<Emulator>,
}

impl Env for Over {
    fn persistent_memory(&self, path: &Path, len: usize) -> io::Result<Memory> {
        self.os.memory(path, len)
    }

    fn flush(&self, memory: &Memory, offset: usize, len: usize) {
        assert!(offset <= memory.len() && len <= memory.len() - offset);
        // SAFETY: the range is inside the memory, which is mapped and writable, as all memory of
        // logs. Others may store to the lines at its ends, or to live figures.
        unsafe {
            let at = memory.ptr().add(offset);
            self.emulator.flush(at, len, Stores::Possible);
        }
    }

    fn counts_arrivals(&self) -> bool {
        true
    }

    fn arrived(&self, bytes: usize) {
        self.emulator.arrived(bytes);
    }

    fn open(&self, path: &Path, how: OpenHow) -> io::Result<Arc<dyn File>> {
        self.os.open(path, how)
    }

    mojim_env::forward_env!(
        os,
        now,
        boot_id,
        random,
        sector,
        create_dir_all,
        close_dir,
        create_dirs,
        file_system,
        remove_empty_dirs,
        max_file_size,
        reach,
        longest_names,
        file_size_limit,
        space,
        most_open,
        remove,
        rename,
        sync_dir,
        list,
        lock,
        locker,
        memory,
        populate,
        remove_memory,
        anonymous_memory,
        connect
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use mojim_config::{EmulatedMemory, MediumKind};
    use mojim_format::{Op, OpKind, RecordWriter};
    use mojim_store::log::{Log, LogIdentity, LogSpec};

    /// What a mirror's log has its memory do for a record that a link has brought.
    fn arrives(medium: MediumKind) -> crate::emulator::Totals {
        let machine = Machine {
            write_bytes_per_second: 8_000_000_000,
            read_ns: 90,
            line_ns: Vec::new(),
        };
        let model = Model::named("NVMM-Raw").unwrap();
        let emulator = Arc::new(Emulator::new(model, machine));
        let env = Emulated(Some(emulator.clone())).over(Os::new().unwrap());
        let dir = Path::new("/dev/shm");
        let spec = LogSpec {
            lane: 0,
            medium,
            path: dir.join(format!("mojim-arrives-log-{}", std::process::id())),
            ring: dir.join(format!("mojim-arrives-ring-{}", std::process::id())),
            size: 64 << 10,
        };
        let paths = [spec.path.clone(), spec.ring.clone()];
        let known = LogIdentity {
            incarnation: 5,
            nonce: 6,
            or: 0,
        };
        let log = Log::open(&env, spec, 64, known, 0, None).unwrap().0;
        log.own(known);
        let len = RecordWriter::len_for(1, 64);
        let at = log.fit(log.head(), len);
        // SAFETY: nobody else appends to this log.
        let slot = unsafe { log.slot(log.head(), at, len, 7, 1) };
        let mut w = RecordWriter::new(slot, 1);
        w.op(Op {
            file: 1,
            kind: OpKind::Write,
            offset: 0,
            len: 64,
        });
        w.payload(&[1; 64]);
        w.finish(7, 1, 1, 0, true, 0);
        log.publish(at, len);
        let before = emulator.totals();
        log.persist_arrived(log.head()).unwrap();
        let now = emulator.totals();
        paths.iter().for_each(|p| _ = env.remove_memory(p));
        crate::emulator::Totals {
            flushed: now.flushed - before.flushed,
            barriers: now.barriers - before.barriers,
            arrived: now.arrived - before.arrived,
            read: now.read - before.read,
        }
    }

    /// In the strict model each byte took the bandwidth twice: as one that arrived, and as flushed.
    #[test]
    fn what_a_link_brings_is_counted_once() {
        let paper = arrives(MediumKind::Dram);
        assert!(paper.arrived > 0 && paper.flushed == 0 && paper.barriers == 0);
        let strict = arrives(MediumKind::Pmem);
        assert!(strict.arrived == 0 && strict.flushed > 0 && strict.barriers == 1);
    }

    #[test]
    fn each_word_of_the_configuration_has_its_model() {
        let names = Model::ALL.map(|m| m.name);
        assert_eq!(EmulatedMemory::WORDS, names);
    }

    #[test]
    fn a_log_lies_in_memory_and_its_flushes_take_the_model_s_time() {
        let machine = Machine {
            write_bytes_per_second: 8_000_000_000,
            read_ns: 90,
            line_ns: Vec::new(),
        };
        let emulator = Arc::new(Emulator::new(Model::named("NVMM-Raw").unwrap(), machine));
        let emulated = Emulated(Some(emulator.clone()));
        let env = emulated.over(Os::new().unwrap());
        let path = Path::new("/dev/shm").join(format!("mojim-emulated-{}", std::process::id()));
        let memory = env.persistent_memory(&path, 1 << 20).unwrap();
        let begun = std::time::Instant::now();
        env.flush(&memory, 4096, 4096);
        // 64 lines of 150 ns, then a barrier.
        assert!(begun.elapsed().as_nanos() >= 64 * 150 + 1_000);
        assert!(env.counts_arrivals());
        env.arrived(100);
        let t = emulator.totals();
        assert_eq!((t.flushed, t.barriers, t.arrived), (4096, 1, 100));
        env.remove_memory(&path).unwrap();
        let plain = Emulated::default().over(Os::new().unwrap());
        assert!(!plain.counts_arrivals());
    }
}
