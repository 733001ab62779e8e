//! One node of the simulator that runs the shipped engine alone.

use std::sync::Arc;
use std::time::Duration;

use mojim_config::{MediumKind, WriteBack};
use mojim_env::{Env, Locker};
use mojim_protocol::AckRule;
use mojim_replica::primary::{Primary, PrimarySpec};
use mojim_sim::World;
use mojim_store::log::LogSpec;
use mojim_store::store::{Store, StoreSpec};

/// Starts node `a`'s program, unreplicated, with a log of `size` bytes on `medium`. Nothing
/// happens in the background.
pub fn start(world: &World, medium: MediumKind, size: u64) -> mojim_env::Result<Primary> {
    let how = PrimarySpec {
        rule: AckRule::LOCAL,
        background_send: false,
        spin: Duration::ZERO,
        resend_timeout: Duration::from_millis(1),
        resend_attempts: 1,
        max_record: 4096,
        checkpoint_threshold: 1,
        write_back: WriteBack::Eager,
        write_back_pages: 1,
        smallest_log: size,
        secondary_threshold: 0,
    };
    let primary = Primary::new(Arc::new(open(world, medium, size)?), how);
    primary.begin_unreplicated("a")?;
    Ok(primary)
}

/// Opens node `a`'s copy.
pub fn open(world: &World, medium: MediumKind, size: u64) -> mojim_env::Result<Store> {
    let env: Arc<dyn Env> = world.env("a");
    let spec = StoreSpec {
        cluster: "c".into(),
        volume: "v".into(),
        node: "a".into(),
        dir: "/a/data".into(),
        meta: "/a/meta".into(),
        logs: vec![LogSpec {
            lane: 0,
            medium,
            path: "/a/logs/log".into(),
            ring: "/shm/ring".into(),
            size,
        }],
        rank: 0,
        holders: 2,
        max_open: 3,
        copy_streams: 1,
        by_hand: true,
        locker: Locker::Program,
    };
    Store::open(&env, spec)
}
