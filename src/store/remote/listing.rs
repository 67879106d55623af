//! The entries of a folder. All kinds of servers use these types for their listings.

use super::state::ObjectState;

/// Whether an entry of a folder can have this name.
pub(super) fn is_entry_name(name: &str) -> bool {
    !["", ".", ".."].contains(&name) && !name.contains(['/', '\0'])
}

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoreEntry {
    /// An object.
    Object(ObjectState),
    /// A folder, which is a common prefix of the names of objects.
    Folder,
}

/// Whether an HTTP server lists folders by WebDAV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum DavState {
    /// The server has not been asked for a listing yet.
    #[default]
    Unknown,
    /// The server has listed a folder.
    Lists,
    /// The server has not answered a listing request in the way of WebDAV.
    ListsNothing,
}
