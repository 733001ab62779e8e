//! Counts of what happened to backups, spill files and replaced nodes in a run.

/// What backups did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backups {
    /// Seeds with two backups.
    pub pairs: u64,
    /// Sessions that began with a whole copy.
    pub copies: u64,
    /// Sessions that began with the records that the logs still had.
    pub by_log: u64,
    /// Attempts to append a record that were refused, since a backup lacked too much.
    pub stalls: u64,
    /// Openings of a log that began with records kept for a backup.
    pub held: u64,
    /// Backups that took the place of a mirror.
    pub mirrors: u64,
    /// Of these, the ones that then became primary.
    pub primaries: u64,
    /// Backups that went on in the place of primary and mirror.
    pub fallbacks: u64,
}

/// What became of spill files.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spills {
    /// Seeds that may have spill files.
    pub seeds: u64,
    /// Files written, to be sent.
    pub begun: u64,
    /// Records appended after a mirror had confirmed the file.
    pub confirmed: u64,
    /// Records appended while no mirror had to have the file.
    pub alone: u64,
    /// Files given up, since the mirror did not get the file or the log failed.
    pub failed: u64,
    /// Sync points with a spill file that were acknowledged.
    pub acked: u64,
}

impl Spills {
    /// Adds the counts of another seed.
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
    /// Backups that were replaced.
    pub backups: u64,
    /// Other nodes that were replaced: they were away, and the view did not need them.
    pub others: u64,
    /// Replacements refused: what was acknowledged would not be on a node that answers.
    pub refused: u64,
    /// New nodes that were primary or mirror at the end.
    pub members: u64,
    /// Replaced nodes that came back.
    pub returns: u64,
}

impl Replacements {
    /// Adds the counts of another seed.
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
