//! Names of tensors. A name is text, or a path through nested dicts and lists.

use std::borrow::Cow;

use serde::Deserialize;

use crate::error::{ErrorKind, Fault, quoted};

/// First byte of a name that is a path. The path follows as a JSON array.
pub(super) const PATH_MARK: u8 = 0x1e;

/// The name of a tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TensorName {
    /// The name in other formats: the text, or the steps of the path joined by dots.
    pub(super) joined: String,
    /// The key of a path, `None` if the name is text.
    path: Option<String>,
}

/// A step of a path: the key of a dict, or the position in a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum PathStep {
    Key(String),
    Position(u64),
}

impl TensorName {
    /// Whether the name is a path.
    pub(super) fn is_path(&self) -> bool {
        self.path.is_some()
    }

    /// The steps as JSON, with a comma after each. So the key of a path begins with the key of each path above it.
    pub(super) fn key(&self) -> Cow<'_, str> {
        match &self.path {
            Some(key) => key.into(),
            None => key_of(&[PathStep::Key(self.joined.clone())]).into(),
        }
    }

    /// Decodes the bytes of a name.
    pub(super) fn decode(bytes: &[u8]) -> Result<TensorName, Fault> {
        let Some((&first, rest)) = bytes.split_first() else {
            return Err(ErrorKind::HeaderDecode
                .fault("a tensor has an empty name; save it with another name"));
        };
        if first == PATH_MARK {
            return path(rest);
        }
        let name = std::str::from_utf8(bytes).map_err(|e| {
            ErrorKind::HeaderUtf8.fault(format!(
                "the name of a tensor is not UTF-8 at its byte {}; save it with another name",
                e.valid_up_to()
            ))
        })?;
        Ok(TensorName { joined: name.to_owned(), path: None })
    }
}

fn path(json: &[u8]) -> Result<TensorName, Fault> {
    let bad = || {
        let text = quoted(&String::from_utf8_lossy(json));
        ErrorKind::HeaderDecode.fault(format!(
            "the name {text} is no JSON array of texts and numbers from 0 on, in one line; \
             save the checkpoint again"
        ))
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
    if joined.is_empty() {
        let message = "a tensor has a path that is an empty name; save it with another name";
        return Err(ErrorKind::HeaderDecode.fault(message));
    }
    Ok(TensorName { joined, path: Some(key_of(&steps)) })
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

/// Refuses two equal names, two paths that give the same name in other formats, and a path that
/// leads through another tensor.
pub(super) fn check_distinct<'a>(names: impl Iterator<Item = &'a TensorName>) -> Result<(), Fault> {
    let mut names: Vec<&TensorName> = names.collect();
    names.sort_unstable_by(|a, b| a.joined.cmp(&b.joined));
    if let Some([first, second]) = names.windows(2).find(|pair| pair[0].joined == pair[1].joined) {
        let message = if first.path == second.path {
            "stands twice in the file, so the file can be read in two ways; \
             save the checkpoint again"
        } else {
            "is the name of two tensors once the steps of their paths are joined by dots; save \
             them with other names"
        };
        return Err(ErrorKind::DuplicateKey.fault(message).tensor(&first.joined));
    }
    if !names.iter().any(|name| name.is_path()) {
        return Ok(());
    }
    let mut keys: Vec<(Cow<'_, str>, &TensorName)> =
        names.iter().map(|name| (name.key(), *name)).collect();
    keys.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let through = |pair: &&[(Cow<'_, str>, &TensorName)]| pair[1].0.starts_with(&*pair[0].0);
    match keys.windows(2).find(through) {
        None => Ok(()),
        Some(pair) => {
            let path = quoted(&pair[1].1.joined);
            let message = format!(
                "is a tensor and also a step of the path {path}; save them with other names"
            );
            Err(ErrorKind::DuplicateKey.fault(message).tensor(&pair[0].1.joined))
        }
    }
}
