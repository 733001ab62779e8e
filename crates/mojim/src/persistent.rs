//! The values that may lie in a heap, and pointers to them.
//!
//! Owns the rules by which bytes of an earlier run are a value of a type again.
//!
//! Invariants:
//!
//! - A block begins with the tag of its type, and how many values it has. A pointer is followed
//!   only to an allocated block with the tag of the pointer's type. So a pointer that is out of
//!   date is an error, or leads to another value of the same type.
//! - A tag has all that the meaning of a type's bytes rests on: its name, its fields' names and
//!   types, these types' own fields, its size and alignment. It does not have what a pointer leads
//!   to, which has a tag of its own.

use std::marker::PhantomData;
use std::num::NonZeroU64;

/// A type whose values mean the same in every run of the program.
///
/// Numbers, `bool`, arrays, [`Ptr`] and `Option<Ptr>` are persistent; a struct of persistent types
/// is made so by [`persistent!`](crate::persistent). References, `Box`, `Vec`, `String`, function
/// pointers and trait objects are not: they lead to memory of one run.
///
/// # Safety
/// - The layout is the same in every program that has the same [`TAG`](Persistent::TAG), size and
///   alignment: `#[repr(C)]`, or a type of the language.
/// - Bytes that were once a value are one in a later run: there is nothing in it that leads to
///   memory outside of the heap, no thread's and no process's number to which safe code gives a
///   meaning, and nothing that changes behind a shared reference.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot lie in a heap: it would lead to memory of one run, or its layout may change",
    label = "not `Persistent`",
    note = "a text is a `Ptr<str>` (`Tx::alloc_str`), many values are a `Ptr<PVec<T>>` (`Tx::alloc_vec`) or a `Ptr<[T]>`",
    note = "a struct is made persistent by `mojim::persistent!`; numbers, `bool`, arrays, `Ptr<T>` and `Option<Ptr<T>>` are so"
)]
pub unsafe trait Persistent: Sized + Send + Sync + 'static {
    /// The type's name, and its fields' names and types.
    const TAG: &'static str;

    /// Of all that the meaning of the bytes rests on.
    #[doc(hidden)]
    const SHAPE: u64 = shape(Self::TAG, [size_of::<Self>(), align_of::<Self>()], &[]);
}

macro_rules! plain {
    ($($t:ty)*) => { $(
        // SAFETY: a number of the language.
        unsafe impl Persistent for $t {
            const TAG: &'static str = stringify!($t);
        }
    )* };
}
plain!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64 bool);

// SAFETY: values side by side.
unsafe impl<T: Persistent, const N: usize> Persistent for [T; N] {
    const TAG: &'static str = T::TAG;
    const SHAPE: u64 = shape("array", [N, align_of::<T>()], &[T::SHAPE]);
}

// SAFETY: an address in the heap, which is always at the same addresses.
unsafe impl<T: ?Sized + 'static> Persistent for Ptr<T> {
    const TAG: &'static str = "Ptr";
}

// SAFETY: as above; the language says that none is 0.
unsafe impl<T: ?Sized + 'static> Persistent for Option<Ptr<T>> {
    const TAG: &'static str = "Option<Ptr>";
}

/// Makes a struct of persistent types that is [`Persistent`](crate::Persistent). Its layout is C's.
///
/// A program whose struct has other fields is refused by a heap that has the old ones. Fields have
/// no attributes but documentation: one that `cfg` takes away would still be in the type's tag.
///
/// ```
/// mojim::persistent! {
///     /// A point.
///     #[derive(Clone, Copy, Debug, PartialEq)]
///     pub struct Point {
///         /// To the right.
///         pub x: i32,
///         pub y: i32,
///     }
/// }
/// assert_eq!(size_of::<Point>(), 8);
/// ```
///
/// ```compile_fail
/// mojim::persistent! {
///     struct Point { x: i32, #[cfg(all())] y: i32 }
/// }
/// ```
///
/// ```compile_fail,E0277
/// mojim::persistent! {
///     struct Note { text: &'static str }
/// }
/// ```
///
/// An enum and a struct with parameters are not taken:
///
/// ```compile_fail
/// mojim::persistent! {
///     enum State { Open, Done }
/// }
/// ```
/// ```compile_fail
/// mojim::persistent! {
///     struct Pair<T> { a: T, b: T }
/// }
/// ```
#[macro_export]
macro_rules! persistent {
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[doc = $doc:expr])* $field_vis:vis $field:ident : $type:ty),* $(,)?
    }) => {
        $(#[$meta])*
        #[repr(C)]
        $vis struct $name {
            $($(#[doc = $doc])* $field_vis $field: $type),*
        }
        // SAFETY: laid out as in C, of persistent fields.
        unsafe impl $crate::Persistent for $name {
            const TAG: &'static str = concat!(
                stringify!($name), " {", $(" ", stringify!($field), ": ", stringify!($type), ","),* , " }"
            );
            const SHAPE: u64 = $crate::shape(
                Self::TAG,
                [size_of::<Self>(), align_of::<Self>()],
                &[$(<$type as $crate::Persistent>::SHAPE),*],
            );
        }
    };
    ($(#[$meta:meta])* $vis:vis enum $($rest:tt)*) => {
        compile_error!("persistent! takes no enum, since not any bytes are one: store a number, and make an enum of it");
    };
    ($(#[$meta:meta])* $vis:vis struct $name:ident < $($rest:tt)*) => {
        compile_error!("persistent! takes no struct with type parameters or lifetimes: write one for each type");
    };
    ($(#[$meta:meta])* $vis:vis struct $name:ident ( $($fields:tt)* ) $($rest:tt)*) => {
        compile_error!("persistent! takes a struct whose fields have names");
    };
    ($($other:tt)*) => {
        compile_error!("persistent! takes one struct with named fields, which have no attributes but documentation");
    };
}

/// A pointer to a value in a heap, which may itself lie in the heap: [`Heap::get`] and [`Tx::get`]
/// follow it. 8 bytes, as has `Option<Ptr<T>>`.
///
/// [`Heap::get`]: crate::Heap::get
/// [`Tx::get`]: crate::Tx::get
#[repr(transparent)]
pub struct Ptr<T: ?Sized>(NonZeroU64, PhantomData<fn() -> *const T>);

impl<T: ?Sized> Clone for Ptr<T> {
    fn clone(&self) -> Ptr<T> {
        *self
    }
}
impl<T: ?Sized> Copy for Ptr<T> {}

impl<T: ?Sized> PartialEq for Ptr<T> {
    fn eq(&self, other: &Ptr<T>) -> bool {
        self.0 == other.0
    }
}
impl<T: ?Sized> Eq for Ptr<T> {}

impl<T: ?Sized> std::fmt::Debug for Ptr<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ptr({:#x})", self.0)
    }
}

impl<T: ?Sized> Ptr<T> {
    pub(crate) fn new(block: *mut u8) -> Option<Ptr<T>> {
        NonZeroU64::new(block as u64).map(|at| Ptr(at, PhantomData))
    }

    pub(crate) fn block(self) -> *mut u8 {
        self.0.get() as *mut u8
    }
}

/// What a pointer may lead to: a [`Persistent`] value, a slice of them, a `str`, or a
/// [`PVec`](crate::PVec).
///
/// # Safety
/// For this crate alone.
pub unsafe trait Stored: 'static {
    /// What is lent of it: itself; of a [`PVec`](crate::PVec), a slice.
    type Target: ?Sized;
    #[doc(hidden)]
    fn name() -> &'static str;
    #[doc(hidden)]
    fn tag() -> u64;
    /// Bytes of `count` of what the block holds.
    #[doc(hidden)]
    fn size(count: usize) -> usize;
    #[doc(hidden)]
    fn at(data: *mut u8, count: usize) -> *mut Self;
    /// What is lent of the value `at`, and the block in which that lies if it is another one.
    ///
    /// # Safety
    /// There is a value, which does not change meanwhile.
    #[doc(hidden)]
    unsafe fn target(heap: mojim_heap::Heap, at: *mut Self) -> Lent<Self::Target>;
}

/// What is lent, and its block.
#[doc(hidden)]
pub type Lent<T> = engine::Result<(*mut T, Option<mojim_heap::Block>)>;

/// FNV-1a of a type's tag, size and alignment, and the shapes of its fields.
#[doc(hidden)]
pub const fn shape(tag: &str, size: [usize; 2], fields: &[u64]) -> u64 {
    const fn with(h: u64, n: u64) -> u64 {
        let (mut h, mut i) = (h, 0);
        while i < 64 {
            h = (h ^ (n >> i & 0xff)).wrapping_mul(0x100_0000_01b3);
            i += 8;
        }
        h
    }
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let (bytes, mut i) = (tag.as_bytes(), 0);
    while i < bytes.len() {
        h = (h ^ bytes[i] as u64).wrapping_mul(0x100_0000_01b3);
        i += 1;
    }
    h = with(with(h, size[0] as u64), size[1] as u64);
    i = 0;
    while i < fields.len() {
        h = with(h, fields[i]);
        i += 1;
    }
    h
}

// SAFETY: of this crate.
unsafe impl<T: Persistent> Stored for T {
    type Target = T;
    fn name() -> &'static str {
        T::TAG
    }
    fn tag() -> u64 {
        T::SHAPE
    }
    fn size(_: usize) -> usize {
        size_of::<T>()
    }
    fn at(data: *mut u8, _: usize) -> *mut T {
        data.cast()
    }
    unsafe fn target(_: mojim_heap::Heap, at: *mut T) -> Lent<T> {
        Ok((at, None))
    }
}

// SAFETY: of this crate.
unsafe impl<T: Persistent> Stored for [T] {
    type Target = [T];
    fn name() -> &'static str {
        T::TAG
    }
    fn tag() -> u64 {
        const { shape("slice", [0, 0], &[T::SHAPE]) }
    }
    fn size(count: usize) -> usize {
        size_of::<T>().saturating_mul(count)
    }
    fn at(data: *mut u8, count: usize) -> *mut [T] {
        std::ptr::slice_from_raw_parts_mut(data.cast(), count)
    }
    unsafe fn target(_: mojim_heap::Heap, at: *mut [T]) -> Lent<[T]> {
        Ok((at, None))
    }
}

// SAFETY: of this crate.
unsafe impl Stored for str {
    type Target = str;
    fn name() -> &'static str {
        "str"
    }
    fn tag() -> u64 {
        const { shape("str", [0, 0], &[]) }
    }
    fn size(count: usize) -> usize {
        count
    }
    fn at(data: *mut u8, count: usize) -> *mut str {
        std::ptr::slice_from_raw_parts_mut(data, count) as *mut str
    }
    unsafe fn target(_: mojim_heap::Heap, at: *mut str) -> Lent<str> {
        Ok((at, None))
    }
}
