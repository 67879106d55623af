//! The entries of a folder, as listings of all kinds of servers tell them.

use super::state::ObjectState;

/// Whether a folder can have an entry of this name.
pub(super) fn is_entry_name(name: &str) -> bool {
    !["", ".", ".."].contains(&name) && !name.contains(['/', '\0'])
}

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoreEntry {
    /// An object.
    Object(ObjectState),
    /// A folder: the first part of the names of objects.
    Folder,
}

/// Whether an HTTP server lists folders as WebDAV does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum DavState {
    /// It was not asked yet.
    #[default]
    Unknown,
    /// It has listed one.
    Lists,
    /// It has not answered as WebDAV does.
    ListsNothing,
}
