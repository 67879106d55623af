//! The version of a file, a folder or a link. It identifies the object and its state by information that the
//! store provides without reading the bytes.

use std::fmt;

/// Seconds and nanoseconds since 1970.
pub type Time = (i64, i64);

/// The device or service that answers reads. Reads with the same key share a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QueueKey {
    /// The device, or the network mount, of local files.
    Device(u64),
    /// A store of another kind, by its number.
    Store(u64),
}

impl fmt::Display for QueueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            QueueKey::Device(dev) => {
                write!(f, "{}:{}", nix::sys::stat::major(dev), nix::sys::stat::minor(dev))
            }
            QueueKey::Store(number) => write!(f, "store {number}"),
        }
    }
}

/// The kind of an entry of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum EntryKind {
    /// A file.
    File,
    /// A folder.
    Folder,
    /// A link.
    Link,
    /// A FIFO, a socket or a device.
    Special,
}

/// Identifies a file. All links to a file have the same `FileId`. A file that replaces another file has a different
/// `FileId`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    pub(crate) queue: QueueKey,
    /// A number that is unique in the queue. For a local file it consists of the inode number and the creation
    /// time of the inode.
    pub(crate) number: [u64; 2],
}

/// Identifies a state of a file. If two versions are equal, no byte and no attribute differs, as far as the
/// store can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version {
    /// Length in bytes.
    pub len: u64,
    pub(crate) file: FileId,
    pub(crate) kind: EntryKind,
    /// Time of the last change of the bytes.
    pub(crate) modified: Option<Time>,
    /// Time of the last change of bytes or attributes. Nobody can set it back.
    pub(crate) changed: Option<Time>,
    /// Numbers that differ if the attributes differ.
    pub(crate) attributes: [u64; 2],
}

/// The identity of the file, with the length and the modification time of its bytes.
type ContentId = (FileId, u64, Option<Time>);

impl Version {
    /// The file that this is a version of.
    pub fn file(&self) -> FileId {
        self.file
    }

    /// The queue of the reads of the file.
    pub fn queue_key(&self) -> QueueKey {
        self.file.queue
    }

    /// The part of the version that changes when the bytes change.
    pub fn content(&self) -> ContentId {
        (self.file, self.len, self.modified)
    }

    /// Time of the last change of the bytes, if the store provides it.
    pub fn modified(&self) -> Option<Time> {
        self.modified
    }

    /// The time that a mount shows for the file: the time of the last change of the bytes, if the store
    /// provides it, and otherwise that of the last change of any kind.
    pub fn shown_time(&self) -> Option<Time> {
        self.modified.or(self.changed)
    }

    /// Time of the last change of bytes or attributes, if the store provides it.
    pub fn changed(&self) -> Option<Time> {
        self.modified.max(self.changed)
    }

    /// Time of the last change of bytes or attributes by the clock of the store. Unlike the modification time
    /// of the bytes, nobody can set this time.
    pub fn attributes_changed(&self) -> Option<Time> {
        self.changed.or(self.modified)
    }

    /// Whether this is a version of a file.
    pub fn is_file(&self) -> bool {
        self.kind == EntryKind::File
    }

    /// Whether this is a version of a folder.
    pub fn is_folder(&self) -> bool {
        self.kind == EntryKind::Folder
    }

    /// Whether this is a version of a link.
    pub fn is_link(&self) -> bool {
        self.kind == EntryKind::Link
    }

    /// A version of a file or a folder in a store that is not the local file system. `number` identifies the file or
    /// folder among all objects of the queue. It contains an identifier of the object. If a store replaces objects and
    /// never changes them, it also contains an identifier of the version of the object.
    pub fn of_object(
        queue: QueueKey,
        number: [u64; 2],
        is_folder: bool,
        len: u64,
        modified: Option<Time>,
    ) -> Version {
        let kind = if is_folder { EntryKind::Folder } else { EntryKind::File };
        let (file, changed) = (FileId { queue, number }, modified);
        Version { len, file, kind, modified, changed, attributes: [0; 2] }
    }

    /// Like `of_object`, for a file whose `number` differs if any of its bytes differs, like an ETag. `changed` is for
    /// people: two versions with different times may have the same bytes.
    pub fn of_tagged_object(
        queue: QueueKey,
        number: [u64; 2],
        len: u64,
        changed: Option<Time>,
    ) -> Version {
        Version { modified: None, ..Version::of_object(queue, number, false, len, changed) }
    }

    /// The version without its queue, whose number may change whenever the file system is mounted.
    #[must_use]
    pub fn lasting(self) -> Version {
        Version { file: FileId { queue: QueueKey::Device(0), ..self.file }, ..self }
    }

    /// The numbers of `file`, without the queue.
    pub fn file_words(&self) -> [u64; 2] {
        self.file.number
    }

    /// The numbers of `content`, without the queue.
    pub fn content_words(&self) -> [u64; 5] {
        let [first, second] = self.file.number;
        let (seconds, nanoseconds) = self.modified.unwrap_or_default();
        [first, second, self.len, seconds as u64, nanoseconds as u64]
    }

    /// All numbers of the version, for files and for other processes.
    pub fn to_words(&self) -> [u64; 14] {
        let (is_store, queue) = match self.file.queue {
            QueueKey::Device(dev) => (0, dev),
            QueueKey::Store(number) => (1, number),
        };
        let [first, second] = self.file.number;
        let [modified, changed] = [self.modified, self.changed].map(|time| match time {
            Some((seconds, nanoseconds)) => [1, seconds as u64, nanoseconds as u64],
            None => [0; 3],
        });
        let words = [
            [self.kind as u64, queue, first],
            [second, self.len, self.attributes[0]],
            modified,
            changed,
        ];
        let mut all = [is_store; 14];
        all[12] = self.attributes[1];
        all.iter_mut().zip(words.as_flattened()).for_each(|(word, found)| *word = *found);
        all
    }

    /// The version with the numbers that `to_words` returned.
    pub fn from_words(words: &[u64; 14]) -> Version {
        let time = |at: usize| {
            let [known, seconds, nanoseconds] = [words[at], words[at + 1], words[at + 2]];
            (known == 1).then_some((seconds as i64, nanoseconds as i64))
        };
        let queue = if words[13] == 0 { QueueKey::Device } else { QueueKey::Store }(words[1]);
        Version {
            len: words[4],
            file: FileId { queue, number: [words[2], words[3]] },
            kind: match words[0] {
                0 => EntryKind::File,
                1 => EntryKind::Folder,
                2 => EntryKind::Link,
                _ => EntryKind::Special,
            },
            modified: time(6),
            changed: time(9),
            attributes: [words[5], words[12]],
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The version of a local file with this inode number, length and seconds of its times.
    pub(crate) fn version(number: u64, len: u64, modified: i64, changed: i64) -> Version {
        let file = FileId { queue: QueueKey::Device(0), number: [number, 0] };
        let (modified, changed) = (Some((modified, 0)), Some((changed, 0)));
        Version { len, file, kind: EntryKind::File, modified, changed, attributes: [0; 2] }
    }

    #[test]
    fn words_have_all_of_a_version() {
        let file = FileId { queue: QueueKey::Device(5), number: [6, 7] };
        for (kind, changed) in [
            (EntryKind::File, None),
            (EntryKind::Folder, Some((-1, 2))),
            (EntryKind::Link, Some((0, 0))),
            (EntryKind::Special, Some((i64::MIN, 9))),
        ] {
            let modified = Some((3, 4));
            let all = Version { len: 8, file, kind, modified, changed, attributes: [9, 10] };
            assert_eq!(Version::from_words(&all.to_words()), all);
        }
    }
}
