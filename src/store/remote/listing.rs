//! The entries of a folder. All kinds of servers use these types for their listings.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use tokio::task::JoinSet;

use super::client::REQUESTS_MAX;
use super::request::Requests;
use super::state::ObjectState;

/// Maximum number of objects of one folder that are requested by their names.
const NAMES_MAX: usize = 100_000;

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

/// The objects among `targets`, which are names with their paths in URLs, that exist. Those for which `is_left_out`
/// accepts the error are left out.
///
/// # Errors
/// If there are more than `NAMES_MAX` of them, or the server refuses a request.
pub(super) async fn look_up_all(
    requests: &Arc<impl Requests>,
    targets: Vec<(String, String)>,
    is_left_out: impl Fn(&str, &io::Error) -> bool,
    deadline: Instant,
) -> io::Result<StoreEntries> {
    if targets.len() > NAMES_MAX {
        let why = format!("has {} files to ask for, more than {NAMES_MAX}", targets.len());
        return Err(io::Error::other(why));
    }
    let mut looks = JoinSet::new();
    let mut rest = targets.into_iter();
    let mut found = StoreEntries::new();
    loop {
        // More concurrent requests would wait for a free place anyway.
        for (name, target) in rest.by_ref().take(REQUESTS_MAX - looks.len()) {
            let requests = requests.clone();
            looks.spawn(async move {
                let state = requests.look(&target, deadline).await;
                (name, state)
            });
        }
        let Some(look) = looks.join_next().await else { break };
        let (name, state) = look.map_err(io::Error::other)?;
        match state {
            Ok(state) => drop(found.insert(name, StoreEntry::Object(state))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if is_left_out(&name, &e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}
