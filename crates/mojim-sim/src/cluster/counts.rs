//! What became of backups, spill files and replaced nodes in a run, as numbers.

/// What backups did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backups {
    /// Seeds with two of them.
    pub pairs: u64,
    /// Sessions that began with a whole copy.
    pub copies: u64,
    /// Sessions that began with what the logs still had.
    pub by_log: u64,
    /// Records that were not taken, since a backup lacked too much.
    pub stalls: u64,
    /// Openings of a log that began with what was kept for a backup.
    pub held: u64,
    /// Backups that took the place of a mirror.
    pub mirrors: u64,
    /// Of these, the ones that then became primary.
    pub primaries: u64,
    /// Backups that went on in the place of both.
    pub fallbacks: u64,
}

/// What became of spill files.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spills {
    /// Seeds that had some.
    pub seeds: u64,
    /// Files written, to be sent.
    pub begun: u64,
    /// Records appended after a mirror had confirmed the file.
    pub confirmed: u64,
    /// Records appended where no mirror had to have it.
    pub alone: u64,
    /// Given up, since the mirror did not get the file or the log failed.
    pub failed: u64,
    /// Their sync points that were acknowledged.
    pub acked: u64,
}

impl Spills {
    /// Adds those of another seed.
    pub fn add(&mut self, o: &Spills) {
        self.seeds += o.seeds;
        self.begun += o.begun;
        self.confirmed += o.confirmed;
        self.alone += o.alone;
        self.failed += o.failed;
        self.acked += o.acked;
    }
}

/// What became of nodes that were replaced.
#[derive(Debug, Clone, Copy, Default)]
pub struct Replacements {
    /// Seeds in which a node may be replaced.
    pub seeds: u64,
    /// Mirrors that were replaced.
    pub mirrors: u64,
    /// Backups that were.
    pub backups: u64,
    /// Other nodes that were: away, and of no use to the view.
    pub others: u64,
    /// Refused: what was acknowledged would rest on nobody who answers.
    pub refused: u64,
    /// New nodes that had the register's or the pair's place at the end.
    pub members: u64,
    /// Replaced nodes that came back.
    pub returns: u64,
}

impl Replacements {
    /// Adds those of another seed.
    pub fn add(&mut self, o: &Replacements) {
        self.seeds += o.seeds;
        self.mirrors += o.mirrors;
        self.backups += o.backups;
        self.others += o.others;
        self.refused += o.refused;
        self.members += o.members;
        self.returns += o.returns;
    }
}
