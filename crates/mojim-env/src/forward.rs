//! Environments that change some methods of another one.
//!
//! Owns the other methods: each one that is named goes on to a field.

/// Within `impl Env`: the methods of these names are those of the field `to`. A method of [`Env`] with
/// a default that is not named keeps that default.
///
/// [`Env`]: crate::Env
#[macro_export]
macro_rules! forward_env {
    ($to:ident, $($name:ident),+ $(,)?) => {
        $($crate::forward_env!(@ $name $to);)+
    };
    (@ now $to:ident) => {
        fn now(&self) -> std::time::Duration {
            self.$to.now()
        }
    };
    (@ boot_id $to:ident) => {
        fn boot_id(&self) -> [u8; 16] {
            self.$to.boot_id()
        }
    };
    (@ random $to:ident) => {
        fn random(&self) -> u64 {
            self.$to.random()
        }
    };
    (@ file_size_limit $to:ident) => {
        fn file_size_limit(&self) -> u64 {
            self.$to.file_size_limit()
        }
    };
    (@ most_open $to:ident) => {
        fn most_open(&self) -> usize {
            self.$to.most_open()
        }
    };
    (@ rename $to:ident) => {
        fn rename(&self, from: &std::path::Path, to: &std::path::Path) -> std::io::Result<()> {
            self.$to.rename(from, to)
        }
    };
    (@ lock $to:ident) => {
        fn lock(
            &self,
            path: &std::path::Path,
            locker: $crate::Locker,
        ) -> std::io::Result<Box<dyn std::any::Any + Send + Sync>> {
            self.$to.lock(path, locker)
        }
    };
    (@ memory $to:ident) => {
        fn memory(&self, path: &std::path::Path, len: usize) -> std::io::Result<$crate::Memory> {
            self.$to.memory(path, len)
        }
    };
    (@ persistent_memory $to:ident) => {
        fn persistent_memory(
            &self,
            path: &std::path::Path,
            len: usize,
        ) -> std::io::Result<$crate::Memory> {
            self.$to.persistent_memory(path, len)
        }
    };
    (@ anonymous_memory $to:ident) => {
        fn anonymous_memory(&self, len: usize) -> std::io::Result<$crate::Memory> {
            self.$to.anonymous_memory(len)
        }
    };
    (@ populate $to:ident) => {
        fn populate(&self, memory: &$crate::Memory) {
            self.$to.populate(memory);
        }
    };
    (@ flush $to:ident) => {
        fn flush(&self, memory: &$crate::Memory, offset: usize, len: usize) {
            self.$to.flush(memory, offset, len);
        }
    };
    (@ connect $to:ident) => {
        fn connect(
            &self,
            to: &$crate::Address,
        ) -> std::io::Result<std::sync::Arc<dyn $crate::Conn>> {
            self.$to.connect(to)
        }
    };
    (@ sector $to:ident) => { $crate::forward_env!(@@ sector usize, $to); };
    (@ create_dir_all $to:ident) => { $crate::forward_env!(@@ create_dir_all (), $to); };
    (@ close_dir $to:ident) => { $crate::forward_env!(@@ close_dir (), $to); };
    (@ create_dirs $to:ident) => { $crate::forward_env!(@@ create_dirs (), $to); };
    (@ remove_empty_dirs $to:ident) => { $crate::forward_env!(@@ remove_empty_dirs (), $to); };
    (@ remove $to:ident) => { $crate::forward_env!(@@ remove (), $to); };
    (@ sync_dir $to:ident) => { $crate::forward_env!(@@ sync_dir (), $to); };
    (@ remove_memory $to:ident) => { $crate::forward_env!(@@ remove_memory (), $to); };
    (@ max_file_size $to:ident) => { $crate::forward_env!(@@ max_file_size u64, $to); };
    (@ reach $to:ident) => { $crate::forward_env!(@@ reach (u64, u64), $to); };
    (@ longest_names $to:ident) => { $crate::forward_env!(@@ longest_names $crate::Longest, $to); };
    (@ space $to:ident) => { $crate::forward_env!(@@ space $crate::Space, $to); };
    (@ locker $to:ident) => { $crate::forward_env!(@@ locker Option<$crate::Locker>, $to); };
    (@ list $to:ident) => { $crate::forward_env!(@@ list Vec<std::path::PathBuf>, $to); };
    (@ file_system $to:ident) => {
        $crate::forward_env!(@@ file_system std::sync::Arc<dyn $crate::FileSystem>, $to);
    };
    // Of a path alone.
    (@@ $name:ident $of:ty, $to:ident) => {
        fn $name(&self, path: &std::path::Path) -> std::io::Result<$of> {
            self.$to.$name(path)
        }
    };
}
