//! Built-in rules for tensor parallelism of well-known families of models.
//!
//! Projections to heads and to the inner dimension of an MLP are divided along their output dimension. The
//! projections back are divided along their input dimension, and the vocabulary by token. Each rank gets norms
//! and routers as a whole. If a module is divided, a tensor of it that is neither weight nor bias is refused,
//! because scales and packed weights of quantized models need rules of their own.

/// The values of `model_type` for which there are rules.
pub(super) const NAMES: [&str; 8] =
    ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox"];

macro_rules! attention {
    () => {
        r#"
[[rule]]
regex = '(^|\.)embed_tokens\.weight$'
cut = 0
[[rule]]
regex = '(^|\.)lm_head\.(weight|bias)$'
cut = 0
optional = true
[[rule]]
regex = '\.self_attn\.q_proj\.(weight|bias)$'
cut = 0
units = "num_attention_heads"
[[rule]]
regex = '\.self_attn\.[kv]_proj\.(weight|bias)$'
cut = 0
units = ["num_key_value_heads", "num_attention_heads"]
[[rule]]
regex = '\.self_attn\.o_proj\.weight$'
cut = 1
units = "num_attention_heads"
"#
    };
}

macro_rules! mlp {
    () => {
        r#"
[[rule]]
regex = '\.mlp\.(gate|up)_proj\.(weight|bias)$'
cut = 0
[[rule]]
regex = '\.mlp\.down_proj\.weight$'
cut = 1
"#
    };
}

macro_rules! mixtral_experts {
    () => {
        r#"
[[rule]]
regex = '\.block_sparse_moe\.experts\.\d+\.w[13]\.weight$'
cut = 0
[[rule]]
regex = '\.block_sparse_moe\.experts\.\d+\.w2\.weight$'
cut = 1
"#
    };
}

macro_rules! qwen_experts {
    () => {
        r#"
[[rule]]
regex = '\.mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up)_proj\.(weight|bias)$'
cut = 0
[[rule]]
regex = '\.mlp\.(experts\.\d+\.|shared_expert\.)?down_proj\.weight$'
cut = 1
"#
    };
}

macro_rules! others {
    () => {
        r#"
[[rule]]
regex = '\.(o|down)_proj\.bias$'
repeat = true
optional = true
[[rule]]
regex = '\.(q|k|v|o|qkv|gate|up|down|gate_up)_proj(\.|$)|\.experts\.|(^|\.)(embed_tokens|lm_head)\.'
refuse = "only weight and bias of separate projections have known cuts"
optional = true
"#
    };
}

/// The rules for models with this `model_type`, as TOML.
pub(super) fn rules(model_type: &str) -> Option<&'static str> {
    match model_type {
        "llama" | "mistral" | "qwen2" | "qwen3" => Some(concat!(attention!(), mlp!(), others!())),
        "mixtral" => Some(concat!(attention!(), mixtral_experts!(), others!())),
        "qwen2_moe" | "qwen3_moe" => Some(concat!(attention!(), qwen_experts!(), others!())),
        "gpt_neox" => Some(GPT_NEOX),
        _ => None,
    }
}

const GPT_NEOX: &str = r#"
[[rule]]
regex = '(^|\.)(embed_in|embed_out)\.weight$'
cut = 0
[[rule]]
regex = '\.attention\.query_key_value\.(weight|bias)$'
cut = 0
units = "num_attention_heads"
[[rule]]
regex = '\.attention\.dense\.weight$'
cut = 1
units = "num_attention_heads"
[[rule]]
regex = '\.mlp\.dense_h_to_4h\.(weight|bias)$'
cut = 0
[[rule]]
regex = '\.mlp\.dense_4h_to_h\.weight$'
cut = 1
[[rule]]
regex = '\.(dense|dense_4h_to_h)\.bias$'
repeat = true
optional = true
[[rule]]
regex = '\.(query_key_value|dense|dense_h_to_4h|dense_4h_to_h)(\.|$)|(^|\.)(embed_in|embed_out)\.'
refuse = "only weight and bias have known cuts"
optional = true
"#;
