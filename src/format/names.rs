//! Names of the files of sharded checkpoints: which set a file belongs to, according to its name.

use std::cmp::Ordering;
use std::path::Path;

use super::OutputFormat;

/// Suffix of weight files.
pub const SUFFIX: &str = ".safetensors";

/// Suffixes of bintensors files: the suffix that is written, and a second one that the bintensors
/// package mentions.
pub const BINTENSORS_SUFFIXES: [&str; 2] = [".bt", ".bintensors"];

/// Suffix of tensorizer files.
pub const TENSORIZER_SUFFIX: &str = ".tensors";

/// Suffixes of files of `torch.save`.
pub const TORCH_SUFFIXES: [&str; 5] = [".bin", ".pt", ".pth", ".ckpt", ".pth.tar"];

/// First words of the names of `torch.save` files that have the state of a training and no weights.
const TORCH_STATES: [&str; 13] = [
    "optim",
    "scheduler",
    "lr_scheduler",
    "rng_state",
    "random_states",
    "scaler",
    "training_args",
    "trainer_state",
    "sampler",
    "dataloader",
    "extra_state",
    "zero_pp_rank",
    "bf16_zero_pp_rank",
];

/// Suffixes of files and folders that a program is still writing.
pub const UNFINISHED: [&str; 8] =
    [".incomplete", ".tmp", ".temp", ".part", ".partial", ".crdownload", ".download", ".aria2"];

/// Minimum number of digits of a shard number. Savers write five digits, and more if the number
/// needs more.
const DIGITS_MIN: usize = 5;

/// Whether the file is hidden. Hidden files are not part of a checkpoint. For example, macOS stores
/// the attributes of `model.safetensors` in a file `._model.safetensors` on file systems without
/// such attributes.
fn is_hidden(name: &str) -> bool {
    name.starts_with('.')
}

/// Whether `name` is a name that torch DCP writes, `shard-00001-<stem>-00001-of-00001.safetensors`.
pub fn is_dcp_shard(name: &str) -> bool {
    let parse = || {
        let rest = name.strip_prefix("shard-")?.strip_suffix(SUFFIX)?;
        let (_, rest) = split_number(rest)?;
        let (stem, _, _) = split_of(rest.strip_prefix('-')?)?;
        (!stem.is_empty()).then_some(())
    };
    parse().is_some()
}

/// A member of a numbered set, according to its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// Name of the whole file under which the set is shown.
    pub output: String,
    /// Number of this shard, from 1.
    pub number: u64,
    /// Number of shards of the set, 0 if the name does not have it.
    pub total: u64,
}

/// Parses `<stem>-00001-of-00003.safetensors` and other spellings in use: with the suffix before
/// the number, after it, or in both places, and with a variant between number and suffix.
pub fn numbered(name: &str) -> Option<Numbered> {
    let (body, suffixed) = match name.strip_suffix(SUFFIX) {
        Some(body) => (body, true),
        None => (name, false),
    };
    let (stem, number, rest) = split_of(body)?;
    let (total, variant) = rest;
    let inner = stem.strip_suffix(SUFFIX);
    let plain = inner.unwrap_or(stem);
    let known = suffixed || (inner.is_some() && variant.is_empty());
    if !known || plain.is_empty() || is_dcp_shard(name) || is_hidden(name) {
        return None;
    }
    Some(Numbered { output: whole(&format!("{plain}{variant}")), number, total })
}

/// Parses `<stem>-00001-of-00003.tensors`.
pub fn numbered_tensorizer(name: &str) -> Option<Numbered> {
    let (stem, number, (total, rest)) = split_of(name.strip_suffix(TENSORIZER_SUFFIX)?)?;
    let known = rest.is_empty() && !stem.is_empty() && !is_hidden(name);
    known.then(|| Numbered { output: whole(stem), number, total })
}

/// Parses `<stem>-00001-of-00003.bin`, also with a variant between number and suffix.
pub fn numbered_torch(name: &str) -> Option<Numbered> {
    let (stem, number, (total, variant)) = split_of(torch_stem(name)?)?;
    (!stem.is_empty()).then(|| Numbered {
        output: torch_whole(&format!("{stem}{variant}")),
        number,
        total,
    })
}

/// Whether the name is that of a weight file of `torch.save`, or of a weight map of such files.
pub fn is_of_torch(name: &str) -> bool {
    is_torch(name) || torch_map_output(name).is_some()
}

/// Whether the name is that of a file of `torch.save` with weights.
pub fn is_torch(name: &str) -> bool {
    torch_stem(name).is_some()
}

/// Whether the name is that of a file of `torch.save` with the state of a training.
pub fn is_torch_state(name: &str) -> bool {
    TORCH_SUFFIXES.iter().any(|suffix| name.ends_with(suffix)) && has_state_stem(name)
}

fn has_state_stem(name: &str) -> bool {
    TORCH_STATES.iter().any(|state| name.starts_with(state))
}

fn torch_stem(name: &str) -> Option<&str> {
    let stem = TORCH_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix))?;
    (!stem.is_empty() && !has_state_stem(stem) && !is_hidden(name)).then_some(stem)
}

/// Name of the file of a distributed checkpoint of torch that says where the tensors lie. It is written last.
pub const DISTCP_METADATA: &str = ".metadata";

/// Suffix of the data files of a distributed checkpoint of torch.
pub const DISTCP_SUFFIX: &str = ".distcp";

/// Whether the name is that of a data file of a distributed checkpoint of torch.
pub fn is_distcp(name: &str) -> bool {
    name.len() > DISTCP_SUFFIX.len() && name.ends_with(DISTCP_SUFFIX) && !is_hidden(name)
}

/// Whether the name is that of any file of a distributed checkpoint of torch.
pub fn is_of_distcp(name: &str) -> bool {
    is_distcp(name) || name == DISTCP_METADATA
}

/// Stem of the names that accelerate gives to files of FSDP.
const FSDP_STEM: &str = "pytorch_model_fsdp";

/// Parses `<stem>_world_size_4_rank_0.pt`, the name of the file of one rank of a training. Ranks are numbered from 0.
/// accelerate names these files `pytorch_model_fsdp_0_rank0.bin`, where the first 0 is the number of the model.
pub fn rank_file(name: &str) -> Option<Numbered> {
    let stem = torch_stem(name)?;
    let plain = |text: &str| text.parse().ok().filter(|number: &u64| number.to_string() == text);
    if let Some((model, rank)) =
        stem.strip_prefix(FSDP_STEM).and_then(|rest| rest.rsplit_once("_rank"))
        && let Some(number) = plain(rank)
    {
        let output = match model.strip_prefix('_').map(plain) {
            None if model.is_empty() => whole("model"),
            Some(Some(0)) => whole("model"),
            Some(Some(model)) => whole(&format!("model_{model}")),
            _ => return None,
        };
        return Some(Numbered { output, number, total: 0 });
    }
    let (front, rank) = stem.rsplit_once("_rank_")?;
    let (stem, total) = front.rsplit_once("_world_size_")?;
    let (number, total) = (plain(rank)?, plain(total)?);
    (!stem.is_empty() && total > 0).then(|| Numbered { output: torch_whole(stem), number, total })
}

/// Whether two files of `torch.save` may belong to one set, according to their names.
pub fn are_of_one_torch_set(one: &str, other: &str) -> bool {
    let output = |name| Some(numbered_torch(name)?.output);
    let of_ranks = |name| Some(rank_file(name)?.output);
    let is_same = |a: Option<String>, b: Option<String>| a.is_some() && a == b;
    one == other || is_same(output(one), output(other)) || is_same(of_ranks(one), of_ranks(other))
}

/// Name of the whole file under which a file of `torch.save` of this name is shown.
pub fn torch_output(name: &str) -> String {
    let stem = TORCH_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
    torch_whole(stem.filter(|stem| !stem.is_empty()).unwrap_or(name))
}

/// The whole file of this stem. `pytorch_model` becomes `model`, because programs that look for
/// `pytorch_model.bin` look for safetensors in `model.safetensors`.
fn torch_whole(stem: &str) -> String {
    match stem.strip_prefix("pytorch_model") {
        Some(rest) => whole(&format!("model{rest}")),
        None => whole(stem),
    }
}

/// Whether the name is that of a weight map, of files of any format.
pub fn is_weight_map(name: &str) -> bool {
    weight_map_output(name).is_some() || torch_map_output(name).is_some()
}

/// Name of the whole file of a weight map for files of `torch.save`. The weight map is called
/// `<stem>.bin.index.json` or `<stem>.bin.index.<variant>.json`.
pub fn torch_map_output(name: &str) -> Option<String> {
    let (stem, rest) = name.strip_suffix(".json")?.rsplit_once(".bin.index")?;
    let is_variant = rest.is_empty() || (rest.starts_with('.') && rest.len() > 1);
    let known = is_variant && !stem.is_empty() && !is_hidden(name);
    known.then(|| torch_whole(&format!("{stem}{rest}")))
}

/// Whether `name` is that of one of several shards of a set.
pub fn is_shard(name: &str) -> bool {
    is_dcp_shard(name) || numbered(name).is_some() || numbered_tensorizer(name).is_some()
}

/// Prefix of the folder of a model in a hub cache.
const HUB_MODEL: &str = "models--";

/// Maximum length of the name of a model or of an organization on the hub.
const HUB_NAME_LEN_MAX: usize = 96;

/// Whether a folder of this name is a model of a hub cache, with `blobs` and `snapshots` in it.
pub fn is_hub_model(name: &str) -> bool {
    name.starts_with(HUB_MODEL)
}

/// Name of the folder in a hub cache for the model with this organization and name.
pub fn hub_model(id: &[&str]) -> String {
    format!("{HUB_MODEL}{}", id.join("--"))
}

/// Whether a model or an organization on the hub can have this name.
pub fn is_hub_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let at_end = |end: char| name.starts_with(end) || name.ends_with(end);
    name.len() <= HUB_NAME_LEN_MAX
        && name.chars().all(is_plain)
        && !name.contains("--")
        && !name.contains("..")
        && !name.ends_with(".git")
        && !at_end('-')
        && !at_end('.')
}

/// A model of the hub, as users write it: `ORG/NAME`, or `ORG/NAME@REVISION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubId<'a> {
    /// Organization and name.
    pub id: [&'a str; 2],
    /// The name of a branch or a tag, or a whole commit hash.
    pub revision: Option<&'a str>,
}

impl HubId<'_> {
    /// Parses `text` as a model of the hub. `None` if `text` has another form.
    pub fn parse(text: &str) -> Option<HubId<'_>> {
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let (organization, name) = id.split_once('/')?;
        let id = [organization, name];
        // The name of a branch may have slashes, but none of its parts may lead out of the folder.
        let is_part = |part: &str| !part.is_empty() && !matches!(part, "." | "..");
        let is_revision =
            |revision: &str| revision.split('/').all(is_part) && !revision.contains('\0');
        let is_valid = id.iter().all(|name| !name.is_empty() && is_hub_name(name));
        (is_valid && revision.is_none_or(is_revision)).then_some(HubId { id, revision })
    }
}

/// Name of the whole file of a weight map. `None` if `name` is not that of a weight map:
/// `<stem>.safetensors.index.json`, `.index.<variant>.json` or `.<variant>.index.json`.
pub fn weight_map_output(name: &str) -> Option<String> {
    let body = name.strip_suffix(".json")?;
    let (stem, rest) = body.rsplit_once(".safetensors.")?;
    let variant = if rest == "index" {
        ""
    } else {
        rest.strip_prefix("index.").or_else(|| rest.strip_suffix(".index"))?
    };
    if stem.is_empty() || rest.starts_with('.') || variant.contains("index") || is_hidden(name) {
        return None;
    }
    let dot = if variant.is_empty() { "" } else { "." };
    Some(whole(&format!("{stem}{dot}{variant}")))
}

/// Name of the weight map of the whole file `output`. A variant stays part of the stem.
pub fn weight_map(output: &str) -> String {
    format!("{output}.index.json")
}

/// Name of a whole file with this stem. Programs treat a file whose name begins with `consolidated`
/// as another format, so the file of such a stem is called `model`.
pub fn whole(stem: &str) -> String {
    match stem.strip_prefix("consolidated") {
        Some(rest) => format!("model{rest}{SUFFIX}"),
        None => format!("{stem}{SUFFIX}"),
    }
}

/// Name of the whole file under which a bintensors file of this name is shown.
pub fn bintensors_output(name: &str) -> Option<String> {
    let stems = BINTENSORS_SUFFIXES.iter().filter_map(|suffix| name.strip_suffix(suffix));
    stems.filter(|stem| !stem.is_empty()).map(whole).next()
}

/// Whether the name is that of a bintensors file.
pub fn is_bintensors(name: &str) -> bool {
    BINTENSORS_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

/// Name of the whole file under which a tensorizer file of this name is shown. Tensorizer files may have other
/// suffixes than `.tensors`.
pub fn tensorizer_output(name: &str) -> String {
    let stem = name.strip_suffix(TENSORIZER_SUFFIX).filter(|stem| !stem.is_empty());
    whole(stem.unwrap_or(name))
}

/// Whether the name is that of a tensorizer file.
pub fn is_tensorizer(name: &str) -> bool {
    name.ends_with(TENSORIZER_SUFFIX)
}

/// Whether the name is that of a safetensors file.
pub fn is_safetensors(name: &str) -> bool {
    name.ends_with(SUFFIX) || numbered(name).is_some()
}

/// Name of the whole file `output` in the format `format`.
pub fn in_format(output: &str, format: OutputFormat) -> String {
    match format {
        OutputFormat::Safetensors => output.to_owned(),
        _ => format!("{}{}", output.strip_suffix(SUFFIX).unwrap_or(output), format.suffix()),
    }
}

/// Name of file `number` of `total` files that together are the file `name` of `format`.
pub fn numbered_name(name: &str, number: u64, total: u64, format: OutputFormat) -> String {
    let stem = name.strip_suffix(format.suffix()).unwrap_or(name);
    format!("{stem}-{number:05}-of-{total:05}{}", format.suffix())
}

/// Suffixes of weight files, except those of torch.
pub const WEIGHT_SUFFIXES: [&str; 4] =
    [SUFFIX, BINTENSORS_SUFFIXES[0], BINTENSORS_SUFFIXES[1], TENSORIZER_SUFFIX];

/// Whether the name is that of a weight file. Hidden files are not weight files.
pub fn is_weights(name: &str) -> bool {
    let is_named = is_safetensors(name) || bintensors_output(name).is_some() || is_tensorizer(name);
    is_named && !is_hidden(name)
}

/// Whether the name is that of a weight file or of a weight map. Pickle files of torch do not count.
pub fn is_weights_or_map(name: &str) -> bool {
    is_weights(name) || weight_map_output(name).is_some()
}

/// Whether the name of the file at `path` is that of a weight file or of a weight map.
pub fn is_of_weights(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    is_weights_or_map(name)
}

/// Compares names, with the numbers in them as numbers: shard 2 comes before shard 10.
pub fn natural_cmp(a: &str, b: &str) -> Ordering {
    let (mut x, mut y) = (a.as_bytes(), b.as_bytes());
    while let (Some(&p), Some(&q)) = (x.first(), y.first()) {
        let order = if p.is_ascii_digit() && q.is_ascii_digit() {
            let (m, n) = (take_digits(&mut x), take_digits(&mut y));
            m.len().cmp(&n.len()).then_with(|| m.cmp(n))
        } else {
            x = &x[1..];
            y = &y[1..];
            p.cmp(&q)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    // The names differ only in leading zeros, or one is a prefix of the other.
    x.len().cmp(&y.len()).then_with(|| a.cmp(b))
}

/// Splits the leading digits off `text`, and returns them without leading zeros.
fn take_digits<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let len = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(len);
    *text = rest;
    let zeros = digits.iter().take_while(|&&b| b == b'0').count();
    &digits[zeros..]
}

/// Splits a number of at least five digits off the front.
fn split_number(text: &str) -> Option<(u64, &str)> {
    let len = text.bytes().take_while(u8::is_ascii_digit).count();
    if len < DIGITS_MIN {
        return None;
    }
    Some((text[..len].parse().ok()?, &text[len..]))
}

/// Splits `<stem>-00001-of-00003<rest>` into stem, number, and (total, rest).
fn split_of(text: &str) -> Option<(&str, u64, (u64, &str))> {
    let (front, back) = text.rsplit_once("-of-")?;
    let (total, rest) = split_number(back)?;
    if !(rest.is_empty() || (rest.starts_with('.') && rest.len() > 1)) {
        return None;
    }
    let (stem, number) = front.rsplit_once('-')?;
    match split_number(number)? {
        (number, "") => Some((stem, number, (total, rest))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str) -> Option<(String, u64, u64)> {
        numbered(name).map(|found| (found.output, found.number, found.total))
    }

    #[test]
    fn files_with_the_state_of_a_training_are_no_weights_of_torch() {
        for name in ["pytorch_model.bin", "model_world_size_1_rank_0.pt", "old.pth.tar", "a.ckpt"] {
            assert!(is_torch(name), "{name}");
        }
        let states = ["optim_world_size_4_rank_0.pt", "extra_state_world_size_4_rank_0.pt"];
        for name in ["optimizer.pt", ".bin", "a.safetensors"].into_iter().chain(states) {
            assert!(!is_torch(name), "{name}");
        }
    }

    #[test]
    fn the_names_of_rank_files_tell_the_rank_and_the_number_of_ranks() {
        let found = |name| rank_file(name).map(|found| (found.output, found.number, found.total));
        assert_eq!(
            found("model_world_size_16_rank_3.pt"),
            Some(("model.safetensors".to_owned(), 3, 16))
        );
        for (name, output) in [
            ("pytorch_model_fsdp_rank3.bin", "model.safetensors"),
            ("pytorch_model_fsdp_0_rank3.bin", "model.safetensors"),
            ("pytorch_model_fsdp_2_rank3.bin", "model_2.safetensors"),
        ] {
            assert_eq!(found(name), Some((output.to_owned(), 3, 0)), "{name}");
        }
        for name in [
            "model_world_size_4_rank_01.pt",
            "model_world_size_4_rank_.pt",
            "model_world_size_0_rank_0.pt",
            "model_rank_0.pt",
            "_world_size_4_rank_0.pt",
            "pytorch_model_fsdp.bin",
            "pytorch_model_fsdp_0.bin",
            "pytorch_model_fsdp_0_rank.bin",
            "pytorch_model_fsdp_0_rank01.bin",
            "pytorch_model_fsdp_00_rank1.bin",
            "pytorch_model_fsdpx_rank1.bin",
            "lora_rank8.bin",
            "optim_world_size_4_rank_0.pt",
        ] {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn two_files_of_torch_are_of_one_set_by_their_numbers_only() {
        for (one, other, same) in [
            ("a.bin", "a.bin", true),
            ("a.bin", "b.bin", false),
            ("m-00001-of-00002.bin", "m-00002-of-00002.bin", true),
            ("m-00001-of-00002.bin", "m-00002-of-00003.bin", true),
            ("m-00001-of-00002.bin", "n-00002-of-00002.bin", false),
            ("m-00001-of-00002.bin", "m.bin", false),
            ("m_world_size_2_rank_0.pt", "m_world_size_2_rank_1.pt", true),
            ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin", true),
            ("pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_1_rank0.bin", false),
        ] {
            assert_eq!(are_of_one_torch_set(one, other), same, "{one} {other}");
        }
    }

    #[test]
    fn the_spellings_of_numbered_shards_name_their_whole_file() {
        let whole = |output: &str| Some((output.to_owned(), 2, 3));
        for (name, output) in [
            ("model-00002-of-00003.safetensors", "model.safetensors"),
            ("model.fp16-00002-of-00003.safetensors", "model.fp16.safetensors"),
            ("unet-00002-of-00003.fp16.safetensors", "unet.fp16.safetensors"),
            ("model.safetensors-00002-of-00003.safetensors", "model.safetensors"),
            ("model.safetensors-00002-of-00003", "model.safetensors"),
            ("a-b-000002-of-000003.safetensors", "a-b.safetensors"),
            ("consolidated-00002-of-00003.safetensors", "model.safetensors"),
        ] {
            assert_eq!(set(name), whole(output), "{name}");
        }
    }

    #[test]
    fn names_that_are_near_a_numbered_shard_are_not_taken_for_one() {
        for name in [
            "model-2-of-3.safetensors",
            "model-00002-of-00003.bin",
            "model-00002-of-00003",
            "model.safetensors-00002-of-00003.lock",
            "-00002-of-00003.safetensors",
            "model-00002-of-00003x.safetensors",
            "model-00002x-of-00003.safetensors",
            "shard-00001-model-00001-of-00001.safetensors",
        ] {
            assert_eq!(set(name), None, "{name}");
        }
    }

    #[test]
    fn weight_maps_are_known_with_every_place_of_the_variant() {
        let output = |name| weight_map_output(name);
        let model = |name: &str| Some(name.to_owned());
        assert_eq!(output("model.safetensors.index.json"), model("model.safetensors"));
        assert_eq!(output("model.safetensors.index.fp16.json"), model("model.fp16.safetensors"));
        assert_eq!(output("unet.safetensors.fp16.index.json"), model("unet.fp16.safetensors"));
        assert_eq!(weight_map("model.safetensors"), "model.safetensors.index.json");
        assert_eq!(output("pytorch_model.bin.index.json"), None);
        assert_eq!(output("config.json"), None);
        assert_eq!(output(".safetensors.index.json"), None);
    }

    #[test]
    fn bintensors_files_are_weights_and_stand_for_a_file_of_their_stem() {
        assert_eq!(bintensors_output("model.bt").as_deref(), Some("model.safetensors"));
        assert_eq!(bintensors_output("a.b.bintensors").as_deref(), Some("a.b.safetensors"));
        assert!(is_weights("model.bt"));
        let of_consolidated = ["consolidated.bt", "consolidated.00.tensors"];
        let outputs =
            (bintensors_output(of_consolidated[0]), tensorizer_output(of_consolidated[1]));
        assert_eq!(outputs, (Some("model.safetensors".into()), "model.00.safetensors".into()));
        for name in [".bt", "model.btx", "model.bt.json", "bt"] {
            assert_eq!(bintensors_output(name), None, "{name}");
            assert!(!is_weights(name), "{name}");
        }
        assert_eq!(in_format("model.safetensors", OutputFormat::Bintensors), "model.bt");
        assert_eq!(in_format("blob", OutputFormat::Bintensors), "blob.bt");
        assert_eq!(in_format("model.safetensors", OutputFormat::Safetensors), "model.safetensors");
        assert_eq!(OutputFormat::of_name("a.bintensors"), Some(OutputFormat::Bintensors));
        assert_eq!(OutputFormat::of_name("a.json"), None);
    }

    #[test]
    fn hidden_files_are_no_weights_and_no_weight_maps() {
        for name in [
            "._model.safetensors",
            "._model-00001-of-00002.safetensors",
            "._shard-00001-model-00001-of-00001.safetensors",
            "._model.bt",
            ".model.safetensors",
            ".safetensors",
        ] {
            assert!(!is_weights(name), "{name}");
            assert_eq!(numbered(name), None, "{name}");
        }
        assert_eq!(weight_map_output("._model.safetensors.index.json"), None);
    }

    #[test]
    fn a_model_of_the_hub_is_organization_and_name_and_maybe_a_revision() {
        let parsed = |text| HubId::parse(text).map(|found| (found.id, found.revision));
        assert_eq!(parsed("Qwen/Qwen3-8B"), Some((["Qwen", "Qwen3-8B"], None)));
        let id = ["a", "b.c_d"];
        assert_eq!(parsed("a/b.c_d@main"), Some((id, Some("main"))));
        assert_eq!(parsed("a/b.c_d@refs/pr/1"), Some((id, Some("refs/pr/1"))));
        assert_eq!(hub_model(&id), "models--a--b.c_d");
        for text in [
            "a",
            "/a/b",
            "./a",
            "../a",
            "a/",
            "/a",
            "a/b/",
            "a/b/c",
            "a/..",
            "a/b@",
            "a/b@../x",
            "a/b@x/../y",
            "a/b@/x",
            "a/b@x//y",
            "a b/c",
            "a--b/c",
            "a/b.git",
            "",
            "a/b@x\0",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn dcp_shards_are_known_by_name() {
        assert!(is_dcp_shard("shard-00001-model-00001-of-00001.safetensors"));
        assert!(is_dcp_shard("shard-123456-a-b-00002-of-00003.safetensors"));
        assert!(!is_dcp_shard("shard-1-model-00001-of-00001.safetensors"));
        assert!(!is_dcp_shard("shard-00001-00001-of-00001.safetensors"));
        assert!(!is_dcp_shard("model-00001-of-00001.safetensors"));
    }

    #[test]
    fn numbers_in_names_are_compared_as_numbers() {
        let mut names = ["s-10", "s-9", "s-009", "s-1-b", "s-1-a", "s"];
        names.sort_by(|a, b| natural_cmp(a, b));
        assert_eq!(names, ["s", "s-1-a", "s-1-b", "s-009", "s-9", "s-10"]);
        // Numbers are compared at any place in a name, and numbers come before letters.
        let mut names = ["l.h10x", "l.x", "l.h2x", "l.10.a", "l.h.w", "l.9.w", "l.9", "l.9.a"];
        names.sort_by(|a, b| natural_cmp(a, b));
        assert_eq!(names, ["l.9", "l.9.a", "l.9.w", "l.10.a", "l.h.w", "l.h2x", "l.h10x", "l.x"]);
    }
}
