//! The figures of failure-atomic msync (FAMS).

use crate::all::adapters::{MEAN, MEDIAN};
use crate::all::figures::{Figure, is, only, ratio};
use crate::all::plot::Kind::{Bars, Lines};

const DEVICES: &str = "The paper had a hard disk and two SSDs of 2012. This is the machine's own disk, \
     which may be virtual.";

/// The figures of failure-atomic msync.
pub(crate) const FAMS: &[Figure] = &[
    Figure {
        id: "pages-saturation",
        title: "Mean time of a sync point by changed pages, without a pause",
        source: "FAMS, Figure 2, saturation",
        measurement: "fams",
        kind: Lines,
        keep: |r| is(r, "us") && r.has(MEAN) && r.has("think 0 us"),
        claims: &[ratio(
            "Failure-atomic / plain, 16 pages",
            "about 1",
            "mojim whole-region, write_back auto",
            16.0,
        )],
        unlike: DEVICES,
    },
    Figure {
        id: "pages-light",
        title: "Mean time of a sync point by changed pages, with pauses of 4 ms",
        source: "FAMS, Figure 2, light load",
        measurement: "fams",
        kind: Lines,
        keep: |r| is(r, "us") && r.has(MEAN) && !r.has("think 0 us"),
        claims: &[
            ratio(
                "At least 4 pages",
                "at most 1",
                "mojim whole-region, write_back auto",
                4.0,
            ),
            ratio(
                "At least 4 pages",
                "at most 1",
                "mojim whole-region, write_back auto",
                16.0,
            ),
        ],
        unlike: DEVICES,
    },
    Figure {
        id: "pages-median",
        title: "Median time of a sync point by changed pages, without a pause",
        source: "FAMS, Figure 3",
        measurement: "fams",
        kind: Lines,
        keep: |r| is(r, "us") && r.has(MEDIAN) && r.has("think 0 us"),
        claims: &[],
        unlike: DEVICES,
    },
    Figure {
        id: "map",
        title: "A map in a heap beside key-value stores",
        source: "FAMS, Table 2",
        measurement: "scripts/bench-map",
        kind: Bars,
        keep: |_| true,
        claims: &[
            only(
                "SSD2, no pause: map, insert, replace, delete",
                "0.586, 0.581, 0.690 ms",
            ),
            only("The same: Kyoto Cabinet", "1.488, 0.579, 0.942 ms"),
            only("The same: SQLite", "1.229, 1.128, 1.047 ms"),
            only("The same: LevelDB", "0.212, 0.220, 0.116 ms"),
        ],
        unlike: DEVICES,
    },
    Figure {
        id: "server",
        title: "A key-value server",
        source: "FAMS, Figure 4 and Table 3",
        measurement: "scripts/ (none yet)",
        kind: Bars,
        keep: |_| true,
        claims: &[
            only(
                "Throughput / Transaction, SSD2: insert, replace, delete",
                "1.36, 1.20, 1.33",
            ),
            only(
                "Response time, light load: insert, replace, delete",
                "1.49, 1.38, 1.41 ms",
            ),
            only("Requests per second, high load", "805, 919, 784"),
        ],
        unlike: "Kyoto Tycoon is not packaged.",
    },
];
