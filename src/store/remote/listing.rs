//! The entries of a folder. All kinds of servers use these types for their listings.

use std::collections::BTreeMap;

use super::state::ObjectState;

/// Whether an entry of a folder can have this name.
pub(super) fn is_entry_name(name: &str) -> bool {
    !["", ".", ".."].contains(&name) && !name.contains(['/', '\0'])
}

/// The entries of a folder by name.
pub(super) type StoreEntries = BTreeMap<String, StoreEntry>;

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoreEntry {
    /// An object.
    Object(ObjectState),
    /// A folder, which is a common prefix of the names of objects.
    Folder,
}
