//! The figures of the Mojim paper: over emulated memory, with more copies, and recovery.

use crate::all::figures::{Figure, ONE_MACHINE, at, ends, is, only, ratio, value};
use crate::all::plot::Kind::{Bars, Lines};

const EMULATED: &str = "Both nodes are processes of one machine, with shared memory in the place of \
     Infiniband. The memory is emulated, so the model's constants take part in each ratio. \
     The page has the model.";

/// The figures over emulated memory.
pub(crate) const NVMM: &[Figure] = &[
    Figure {
        id: "latency-by-memory",
        title: "Latency of a sync point of 4 KiB, by memory and scheme",
        source: "Mojim, Figure 4",
        measurement: "nvmm",
        kind: Bars,
        keep: |r| is(r, "us") && at(r, 4096.0),
        claims: &[
            ratio(
                "M-sync / S-unreplicated, NVMM",
                "0.60",
                "NVMM-Raw: sync, shm",
                4096.0,
            ),
            ratio(
                "M-sync / S-unreplicated, DRAM",
                "0.55",
                "PDRAM: sync, shm",
                4096.0,
            ),
            ratio(
                "M-async / S-unreplicated, NVMM",
                "about 1",
                "NVMM-Raw: async, shm",
                4096.0,
            ),
            ratio(
                "M-syncflush / S-unreplicated",
                "above 1",
                "NVMM-Raw: sync-flush, shm",
                4096.0,
            ),
        ],
        unlike: EMULATED,
    },
    Figure {
        id: "throughput-by-memory",
        title: "Throughput of sync points of 4 KiB, by memory and scheme",
        source: "Mojim, Figure 5",
        measurement: "nvmm",
        kind: Bars,
        keep: |r| is(r, "1/s") && at(r, 4096.0),
        claims: &[only("Mojim / S-unreplicated, all schemes", "0.4 to 2.7")],
        unlike: EMULATED,
    },
    Figure {
        id: "latency-by-size",
        title: "Latency of a sync point by its size, on NVMM-Raw",
        source: "Mojim, Figure 8",
        measurement: "nvmm",
        kind: Lines,
        keep: |r| is(r, "us") && r.series.starts_with("NVMM-Raw"),
        claims: &[
            ratio(
                "M-sync / S-unreplicated, 8 B",
                "below 1",
                "NVMM-Raw: sync, shm",
                8.0,
            ),
            ratio(
                "M-sync / S-unreplicated, 1 KiB",
                "below 1",
                "NVMM-Raw: sync, shm",
                1024.0,
            ),
            ratio(
                "M-sync / S-unreplicated, 12 KiB",
                "below 1",
                "NVMM-Raw: sync, shm",
                12288.0,
            ),
            ratio(
                "M-async / S-unreplicated, 8 B",
                "below 1",
                "NVMM-Raw: async, shm",
                8.0,
            ),
        ],
        unlike: EMULATED,
    },
    Figure {
        id: "latency-by-size-strict",
        title: "Latency of a sync point by its size, where the mirror flushes, too",
        source: "Mojim, Figure 8, with a strict model of our own",
        measurement: "nvmm-strict",
        kind: Lines,
        keep: |r| is(r, "us"),
        claims: &[only("The paper's mirror does not flush", "no value")],
        unlike: EMULATED,
    },
];

/// The figures of more copies, threads and recovery.
pub(crate) const COPIES: &[Figure] = &[
    Figure {
        id: "schemes-tcp",
        title: "Sync points of 4 KiB with three nodes, over TCP",
        source: "Mojim, Figures 6 and 7",
        measurement: "tiers",
        kind: Bars,
        keep: |r| is(r, "us") && ends(r, ", tcp") && at(r, 4096.0),
        claims: &[
            ratio("E-chain / M-syncsec", "1.8", "chain, tcp", 4096.0),
            ratio("E-broadcast / M-syncsec", "2.8", "broadcast, tcp", 4096.0),
        ],
        unlike: ONE_MACHINE,
    },
    Figure {
        id: "schemes-shm",
        title: "Sync points of 4 KiB with three nodes, over shared memory",
        source: "Mojim, Figures 6 and 7; the slides' sync-sec, chain and broadcast",
        measurement: "tiers",
        kind: Bars,
        keep: |r| is(r, "us") && ends(r, ", shm") && at(r, 4096.0),
        claims: &[
            ratio("E-chain / M-syncsec", "1.8", "chain, shm", 4096.0),
            ratio("E-broadcast / M-syncsec", "2.8", "broadcast, shm", 4096.0),
        ],
        unlike: ONE_MACHINE,
    },
    Figure {
        id: "threads-connections",
        title: "Throughput of sync points of 4 KiB, by threads and connections",
        source: "Mojim, Figure 9",
        measurement: "connections",
        kind: Lines,
        keep: |r| is(r, "1/s"),
        claims: &[only("M-sync scales with connections", "no value")],
        unlike: "The logs are in plain memory or on the disk, not on emulated memory. Many threads \
                 share few processors.",
    },
    Figure {
        id: "copies",
        title: "Time to bring a node up to date",
        source: "Mojim, 6.5",
        measurement: "tiers",
        kind: Bars,
        keep: |r| is(r, "s"),
        claims: &[
            only("5 GB to a new mirror", "1.9 s, 2.6 GB/s"),
            value(
                "Seconds of a full copy, of the volume's size here",
                "no value",
                "resync",
            ),
        ],
        unlike: "The paper copies from memory to memory over Infiniband. Here a copy is durable on a disk.",
    },
    Figure {
        id: "copies-bytes",
        title: "Bytes that travel to bring a node up to date",
        source: "ours",
        measurement: "tiers",
        kind: Bars,
        keep: |r| is(r, "B"),
        claims: &[],
        unlike: "A hundredth of the pages changed while the node was away.",
    },
    Figure {
        id: "failover",
        title: "Time without a primary after a node was killed",
        source: "Mojim, 6.5",
        measurement: "failover",
        kind: Bars,
        keep: |r| is(r, "ms"),
        claims: &[only(
            "Flush of the caches after the mirror's loss",
            "450 µs",
        )],
        unlike: "The paper gives no time of a takeover.",
    },
];
