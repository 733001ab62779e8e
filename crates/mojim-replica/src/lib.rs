//! Primary, mirror and backups: the state machines of their sessions,
//! and their roles by the register of views.
//!
//! # The life of a sync point, steps 2 to 6 and 9 of `ARCHITECTURE.md`
//!
//! Steps run in the thread that called, unless said otherwise. For a guest's sync point a thread of
//! the owner does them. The link thread steps `session`. It sends and receives in `async`. In other
//! modes it does so only after 2 to 20 ms without an answer.
//!
//! **Append** (`primary/append.rs`). A volume has `connections` **lanes**, by default one for all.
//! The thread takes its own lane, or a free one. It takes an LSN and room in one short step. Then,
//! beside other threads, it encodes the record in the lane's ring, or parts of it with LSNs in a
//! row (`piece.rs`). Only what is filled without a gap is sent and written.
//!
//! The bytes of an exact range are read after the LSN is taken. A range that is compared with the
//! committed bytes, or that spills, was read before, and holds its regions until it has its LSN. So
//! of two sync points that overlap, the one with the higher LSN has everything stored before either
//! call. Bytes stored during both may be in the lower one alone, and then count as changed.
//!
//! A sync point larger than about half of the smallest log goes to a **spill file** on both nodes
//! first. A small record names it (`primary/spill.rs`, `spill_out.rs`, `mirror/control.rs`). The
//! mirror refuses a record whose spill file it lacks (`check_spill` in `mirror/lane.rs`).
//!
//! **Send** (`link.rs`). Over TCP one `sendmsg` takes up to 16 records from the ring. Over shared
//! memory it is a store to the position that the mirror polls. Sending, writing the log and
//! receiving have a lock each on a lane. Its holder works for all threads (`primary/group.rs`).
//!
//! **Write the own log**. Where the rule asks for it, this is one `pwrite` from the record's slot
//! to the preallocated O_DIRECT|O_DSYNC log, while the record travels. Otherwise the checkpoint
//! thread writes the log before it applies.
//!
//! **Mirror** (`mirror/lane.rs`). One thread for each lane checks what came: checksum, epoch,
//! order. It appends to its own log, writes that log if it is on a disk, and acknowledges all of it
//! in 32 bytes.
//!
//! **Commit**. The thread with the receiving end polls for `spin` (among other threads 100 µs
//! without progress), then blocks (`primary/wait.rs`). Others look, then sleep
//! (`primary/waiters.rs`). The thread marks acknowledged LSNs in a lock-free ring, which gives a
//! prefix over all lanes. It wakes the callers whose LSN the prefix of the rule has reached
//! (`primary/rule.rs`). When it leaves, it wakes one sleeper to work on. A call with `MS_ASYNC`
//! returns after the send (in `async` after the append). Of a sync point in parts, others hear only
//! when it is whole (`primary/split.rs`).
//!
//! **Backups** (`backup_session.rs`). The mirror, or a primary without one, has a thread for each.
//! It sends the log's records, and the backup appends them as a mirror does. No sync point waits
//! until a backup lags by `secondary_threshold` (`backup_progress.rs`). `fallback_timer.rs` says
//! when a backup takes the place of primary and mirror (`fallback`).
//!
//! # If the mirror is silent
//!
//! The primary closes all links in three cases: 3 s of silence, a sync point that stands still for
//! `resend_timeout` (2 s), a link that ends. It connects again, and sends from the ring what the
//! mirror lacks.
//!
//! - Without a register the call fails with ETIMEDOUT after `resend_attempts` of these periods (10
//!   s). The sync point is in doubt and not applied. It is sent again when the mirror is back.
//! - With a register, silence is at most `failure_limit` (3 s), and a standstill a quarter of that.
//!   Once its link has not worked for `failure_limit` in all, the primary makes its own log
//!   persistent and asks to be alone. From the answer on it acknowledges what that log holds, and
//!   the call succeeds. Without a majority the call fails after 10 s, or after 2 × `failure_limit`
//!   + 3 s if that is more (`layout.rs`).
//!
//! # Sessions
//!
//! `peer_link.rs` has the phases, for a mirror and for a backup. `handshake.rs` opens the lanes for
//! both, with `session/lanes.rs` and `LaneServer::accept` in `mirror/lane.rs`. `session/agree.rs`
//! acts on what `mojim_protocol::reconcile` decides. The files in `tests/transcripts/` hold whole
//! conversations. Any failure closes all links and begins again. A node that refuses a link says
//! why by a `RefuseCode`, in `mirror.rs` or in `mojim-node`. `refused` in `session/agree.rs` and in
//! `backup_session.rs` acts on it.
//!
//! A mirror that comes back gets the records above its tail while the primary's log has them, after
//! the spill files that they name. Otherwise it gets a copy (`session/transfer.rs`). `plan_for` in
//! `session/agree.rs` may overrule that. The mirror's side is `hello` and `start` in `mirror.rs`.
//! While no link is up, a checkpoint keeps nothing for it (`primary/write_back.rs`).
//!
//! With a register, a mirror may stay away for 2 × `failure_limit` while the primary is alone. Then
//! the active backup that has most takes its place in a new epoch (`replace_mirror` in
//! `session/views.rs`).
//!
//! # Who may become primary
//!
//! With a register `view.rs` of `mojim-protocol` decides, without one `promotion.rs` there. A
//! primary asks the register through `view_client.rs`, on a thread of its own (`register.rs`).
//! `mirror/promote.rs` takes over. It asks the other holders what they know to be acknowledged
//! (`told.rs`). One that lacks some of it stays a mirror. Otherwise it stops its session and lanes,
//! and promises the greater epoch durably. Only then it asks for the view. A program that attaches
//! waits for its mirror, or goes on alone: `attach.rs` decides.
//!
//! An old primary appends to its ring and log as before, and applies only what was committed. It
//! fails for good with ESTALE (`Primary::supersede`) in three cases:
//!
//! - the register names another primary,
//! - its mirror knows a newer view,
//! - without a register, its mirror has promised a greater epoch.
//!
//! Until it reaches one of them, calls that need the mirror fail with ETIMEDOUT. A later attach
//! there is refused, with the exceptions of `docs/reference/guarantees.md`.
//!
//! # Threads that wait
//!
//! `spinner.rs` says how long a poll is worth it, `yield_policy.rs` when to yield. A program's loop
//! is in `primary/group.rs`, that of a mirror's lane in `serve_lane` of `mojim-node`. At a mirror
//! `lane_concurrency.rs` says whether several threads send. `core_placement.rs` keeps the two ends
//! of a link on one host on different processors.
//!
//! # What the background does
//!
//! `checkpoint_step` in `primary/write_back.rs` and in `mirror.rs` has the thresholds: when records
//! are applied, and when a node checkpoints. `pace.rs` tells pauses from work: `IDLE` there is the
//! pause of 50 ms. The callers are `checkpoint_turns` in `mojim-engine` and `checkpoint_loop` in
//! `mojim-node`.
//!
//! # Configuration and questions
//!
//! `layout.rs` makes the paths, and what a store and a primary get of the configuration
//! (`PrimarySpec` in `primary.rs`). A mirror gets the rest in `lib.rs` of `mojim-node`.
//! `holders.rs` has the addresses of the other nodes. Questions to nodes are `request.rs`, and
//! `client.rs` sends them.

pub mod attach;
pub mod backup_progress;
pub mod backup_session;
pub mod client;
mod core_placement;
pub mod fallback_timer;
mod handshake;
pub mod holders;
mod lane_concurrency;
pub mod layout;
pub mod link;
pub mod mirror;
pub mod pace;
pub mod peer_link;
pub mod piece;
pub mod primary;
pub mod register;
pub mod request;
pub mod session;
mod spill_out;
pub mod spinner;
pub mod told;
pub mod view_client;
pub mod yield_policy;
