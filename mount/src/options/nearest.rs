//! Suggestions for words that may be typing errors.

/// The word of `known` that is most similar to `word`. `None` if no word is similar enough.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |name: &str| strsim::damerau_levenshtein(word, name);
    let near = known.into_iter().min_by_key(|name| distance(name))?;
    (distance(near) <= near.len().min(word.len()).div_ceil(2)).then_some(near)
}

/// The text ``; did you mean `X`?``. Empty if no word is similar enough.
pub(crate) fn hint<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, known).map_or_else(String::new, |near| format!("; did you mean `{near}`?"))
}
