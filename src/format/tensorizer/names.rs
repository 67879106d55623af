//! Names of tensors: text, or a path through nested dicts and lists.

use serde::Deserialize;

use crate::error::{ErrorKind, Fault, quoted};

/// First byte of a name that is a path. A JSON array follows.
const PATH_MARK: u8 = 0x1e;

/// The name of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TensorName {
    /// The name in other formats: text as it is, the steps of a path joined by dots.
    pub(super) joined: String,
    /// Whether it is a path.
    pub(super) is_path: bool,
    /// Its steps as JSON, with a comma after each. A path begins with the key of each path above it.
    key: String,
}

/// A step of a path: the key of a dict, or a position in a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum PathStep {
    Key(String),
    Position(u64),
}

impl TensorName {
    /// Decodes the bytes of a name.
    pub(super) fn decode(bytes: &[u8]) -> Result<TensorName, Fault> {
        let Some((&first, rest)) = bytes.split_first() else {
            return Err(Fault::new(ErrorKind::HeaderDecode, "a tensor has an empty name"));
        };
        if first == PATH_MARK {
            return path(rest);
        }
        let name = std::str::from_utf8(bytes).map_err(|e| {
            let message =
                format!("the name of a tensor is not UTF-8 at its byte {}", e.valid_up_to());
            Fault::new(ErrorKind::HeaderUtf8, message)
        })?;
        let key = key_of(&[PathStep::Key(name.to_owned())]);
        Ok(TensorName { joined: name.to_owned(), is_path: false, key })
    }
}

fn path(json: &[u8]) -> Result<TensorName, Fault> {
    let bad = || {
        let text = quoted(&String::from_utf8_lossy(json));
        let message =
            format!("the name {text} is no JSON array of texts and numbers from 0 on, in one line");
        Fault::new(ErrorKind::HeaderDecode, message)
    };
    if json.first() != Some(&b'[') || json.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return Err(bad());
    }
    let steps: Vec<PathStep> = serde_json::from_slice(json).map_err(|_| bad())?;
    if steps.is_empty() {
        return Err(bad());
    }
    let texts = steps.iter().map(|step| match step {
        PathStep::Key(key) => key.clone(),
        PathStep::Position(position) => position.to_string(),
    });
    let joined = texts.collect::<Vec<_>>().join(".");
    Ok(TensorName { joined, is_path: true, key: key_of(&steps) })
}

fn key_of(steps: &[PathStep]) -> String {
    let mut key = String::new();
    for step in steps {
        match step {
            PathStep::Key(text) => {
                key.push_str(&serde_json::Value::from(text.as_str()).to_string())
            }
            PathStep::Position(position) => key.push_str(&position.to_string()),
        }
        key.push(',');
    }
    key
}

/// Refuses two equal names, two paths that are one name in other formats, and a path through
/// another tensor.
pub(super) fn check_distinct<'a>(names: impl Iterator<Item = &'a TensorName>) -> Result<(), Fault> {
    let mut names: Vec<&TensorName> = names.collect();
    names.sort_unstable_by(|a, b| a.joined.cmp(&b.joined));
    if let Some(&[first, second]) = pairs(&names).find(|[a, b]| a.joined == b.joined) {
        let message = if first.key == second.key {
            "stands twice in the file, so the file can be read in two ways"
        } else {
            "is the name of two tensors once the steps of their paths are joined by dots; save \
             them with other names"
        };
        return Err(Fault::new(ErrorKind::DuplicateKey, message).tensor(&first.joined));
    }
    names.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    match pairs(&names).find(|[above, below]| below.key.starts_with(&above.key)) {
        None => Ok(()),
        Some([first, second]) => {
            let message =
                format!("is a tensor and also a step of the path {}", quoted(&second.joined));
            Err(Fault::new(ErrorKind::DuplicateKey, message).tensor(&first.joined))
        }
    }
}

fn pairs<'a, 'b>(names: &'b [&'a TensorName]) -> impl Iterator<Item = &'b [&'a TensorName; 2]> {
    names.windows(2).filter_map(|pair| pair.first_chunk())
}
