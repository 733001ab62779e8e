//! The expected files of the volume: the operations of sync points, and their effect on the files.
//!
//! Owns no state. Invariant: nothing here is code of the engine, which is compared with
//! it.

use mojim_replica::piece::Piece;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One operation of a sync point; it owns its bytes.
#[derive(Debug, Clone)]
pub enum ModelOp {
    /// Bytes to an offset of a file.
    Write {
        /// The file's number.
        file: u32,
        /// Where.
        offset: u64,
        /// What.
        bytes: Vec<u8>,
    },
    /// A new file.
    Create {
        /// Its number.
        file: u32,
        /// Its name.
        name: String,
    },
    /// A file's size changes.
    Resize {
        /// The file's number.
        file: u32,
        /// The new size, in bytes.
        size: u64,
    },
    /// A file is removed.
    Remove {
        /// The file's number.
        file: u32,
    },
    /// A file's name changes.
    Rename {
        /// The file's number.
        file: u32,
        /// Its new name.
        name: String,
    },
}

impl ModelOp {
    /// The operation as the engine takes it; valid while the change lives.
    pub fn piece(&self) -> Piece<'_> {
        match self {
            ModelOp::Write {
                file,
                offset,
                bytes,
            } => Piece::Write {
                file: *file,
                offset: *offset,
                ptr: bytes.as_ptr(),
                len: bytes.len(),
            },
            ModelOp::Create { file, name } => Piece::Create { file: *file, name },
            ModelOp::Resize { file, size } => Piece::Resize {
                file: *file,
                size: *size,
            },
            ModelOp::Remove { file } => Piece::Remove { file: *file },
            ModelOp::Rename { file, name } => Piece::Rename { file: *file, name },
        }
    }
}

/// The expected state of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub data: Arc<Vec<u8>>,
}

/// All files, by number.
pub type Files = BTreeMap<u32, Model>;

/// Applies one more sync point to the files.
pub fn apply(files: &mut Files, changes: &[ModelOp]) {
    for c in changes {
        match c {
            ModelOp::Write {
                file,
                offset,
                bytes,
            } => {
                let data = Arc::make_mut(&mut files.get_mut(file).expect("it is there").data);
                data[*offset as usize..*offset as usize + bytes.len()].copy_from_slice(bytes);
            }
            ModelOp::Create { file, name } => {
                let model = Model {
                    name: name.clone(),
                    data: Arc::default(),
                };
                files.insert(*file, model);
            }
            ModelOp::Resize { file, size } => {
                let data = Arc::make_mut(&mut files.get_mut(file).expect("it is there").data);
                data.resize(*size as usize, 0);
            }
            ModelOp::Remove { file } => {
                files.remove(file);
            }
            ModelOp::Rename { file, name } => {
                files.retain(|id, f| id == file || f.name != *name);
                files.get_mut(file).expect("it is there").name = name.clone();
            }
        }
    }
}
