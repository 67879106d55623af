//! Tensors as parts of layers. The tensors of the same part in two layers have names that differ only in the number of
//! the layer. If a program reads the parts of one layer in some order, it reads the parts of the next layer in the same
//! order.

use std::collections::HashMap;

/// Maximum number of parts whose followers are remembered.
const STEPS_MAX: usize = 1 << 12;

/// Which part of which layer a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerPart {
    /// A number for the name of the tensor without the number of the layer.
    pub part: u32,
    /// The number of the layer. It is 0 if the name has no number.
    pub layer: u32,
}

/// The parts of the layers of a file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layers {
    parts: Vec<LayerPart>,
    tensors: HashMap<LayerPart, u32>,
}

impl Layers {
    /// The layer and the part of each tensor with these names.
    pub(crate) fn of<'a>(names: impl Iterator<Item = &'a str>) -> Layers {
        let mut numbers: HashMap<(&str, Option<&str>), u32> = HashMap::new();
        let mut layers = Layers::default();
        for (tensor, name) in names.enumerate() {
            let (before, layer, after) = split_at_layer(name);
            let next = numbers.len() as u32;
            let part = LayerPart { part: *numbers.entry((before, after)).or_insert(next), layer };
            layers.parts.push(part);
            layers.tensors.insert(part, tensor as u32);
        }
        layers
    }

    pub(crate) fn part(&self, tensor: u32) -> Option<LayerPart> {
        self.parts.get(tensor as usize).copied()
    }

    pub(crate) fn tensor(&self, part: LayerPart) -> Option<u32> {
        self.tensors.get(&part).copied()
    }
}

/// Splits a name at the number of the layer, which is the first word that is a number. Returns the text before it, the
/// number, and the text after it. If no word is a number, the text after it is `None`.
fn split_at_layer(name: &str) -> (&str, u32, Option<&str>) {
    let mut start = 0;
    for word in name.split('.') {
        let end = start + word.len();
        let is_number = word.bytes().all(|b| b.is_ascii_digit());
        // The word `00` would give the same layer as `0`, so it does not count as a number.
        let is_plain = is_number && (word == "0" || !word.starts_with('0'));
        if let (Ok(layer), true) = (word.parse(), is_plain) {
            return (&name[..start], layer, Some(&name[end..]));
        }
        start = end + 1;
    }
    (name, 0, None)
}

/// For each part, the step to the part that a reader begins next.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerSteps(HashMap<u32, LayerStep>);

/// The next part, and the distance from the current layer to the layer of the next part.
#[derive(Clone, Copy, Debug)]
struct LayerStep {
    part: u32,
    layers: i64,
}

impl LayerSteps {
    /// Notes that the reader began `after` directly after `before`.
    pub(super) fn learn(&mut self, before: LayerPart, after: LayerPart) {
        if self.0.len() < STEPS_MAX || self.0.contains_key(&before.part) {
            let layers = i64::from(after.layer) - i64::from(before.layer);
            self.0.insert(before.part, LayerStep { part: after.part, layers });
        }
    }

    /// The part that the reader is likely to begin after `part`.
    pub(super) fn after(&self, part: LayerPart) -> Option<LayerPart> {
        let step = self.0.get(&part.part)?;
        let layer = u32::try_from(i64::from(part.layer) + step.layers).ok()?;
        Some(LayerPart { part: step.part, layer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_the_first_word_that_is_a_number() {
        for (name, parts) in [
            ("model.layers.12.mlp.experts.3.up", ("model.layers.", 12, Some(".mlp.experts.3.up"))),
            ("0.weight", ("", 0, Some(".weight"))),
            ("h.7", ("h.", 7, Some(""))),
            ("h.", ("h.", 0, None)),
            ("h.00.a", ("h.00.a", 0, None)),
            ("conv1.weight", ("conv1.weight", 0, None)),
            ("a.+1.b", ("a.+1.b", 0, None)),
            ("a.99999999999.2", ("a.99999999999.", 2, Some(""))),
            ("", ("", 0, None)),
        ] {
            assert_eq!(split_at_layer(name), parts);
        }
    }

    #[test]
    fn a_step_leads_to_the_same_part_of_another_layer() {
        let names = ["a", "l.0.q", "l.0.k", "l.1.q", "l.1.k", "l.2.q"];
        let layers = Layers::of(names.into_iter());
        let part = |tensor| layers.part(tensor).unwrap();
        let mut steps = LayerSteps::default();
        steps.learn(part(1), part(2));
        steps.learn(part(2), part(3));
        let next = |tensor| steps.after(part(tensor)).and_then(|part| layers.tensor(part));
        assert_eq!([1, 2, 3, 4, 5].map(next), [Some(2), Some(3), Some(4), Some(5), None]);
        assert_eq!(next(0), None);
    }
}
