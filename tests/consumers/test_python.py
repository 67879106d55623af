"""Packages of Python, unmodified."""

import json
import os
import subprocess
import sys
import unittest
import urllib.request
from pathlib import Path
from unittest import mock

import numpy as np

import object_server
from checkpoints import hub_cache
from rows import CONFIG, VOCAB, Mount, Row, load_file, needs, version_of, write_rank_shards, write_shards, write_tokenizer

COMFYUI = os.environ.get("COMFYUI_SOURCES")


class Safetensors(Row):
    def test_safetensors_by_mmap_and_by_pread(self):
        from safetensors import safe_open

        self.used("safetensors", version_of("safetensors"))
        for backend in ("mmap", "pread"):
            with safe_open(self.mnt / "model.safetensors", "np", backend=backend) as f:
                self.assert_same_tensors({name: f.get_tensor(name) for name in f.keys()}, self.tensors)
                part = f.get_slice("lm_head.weight")[5:9, 3:]
                np.testing.assert_array_equal(part, self.tensors["lm_head.weight"][5:9, 3:])


@needs("torch", "transformers")
class Transformers(Row):
    def load(self, folder, **how):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, **how)

    def test_transformers(self):
        self.used("transformers", version_of("transformers"))
        right = self.load(self.real).state_dict()
        self.assert_same_tensors(self.load(self.mnt).state_dict(), right)
        self.assert_same_tensors(self.load(self.mnt, disable_mmap=True).state_dict(), right)

    def test_transformers_on_shards(self):
        mnt = self.enter(Mount(self.shards, "layout=original")).path
        self.assertEqual(len(list(mnt.glob("model-*.safetensors"))), 3)
        self.assert_same_tensors(self.load(mnt).state_dict(), self.load(self.real).state_dict())

    @needs("accelerate")
    def test_accelerate(self):
        import torch
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.used("accelerate", version_of("accelerate"))
        whole = self.load(self.real)
        right = whole.state_dict()
        on_disk = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        for device_map in ({"": "cpu"}, on_disk):
            with init_empty_weights():
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.mnt))
            load_checkpoint_and_dispatch(model, self.mnt, device_map=device_map, offload_folder=self.tmp / "offload")
            found = {name: value for name, value in model.state_dict().items() if value.device.type != "meta"}
            # The others lie on the "disk", which is the mount: it reads them at each use.
            self.assertEqual(len(found) == len(right), device_map is not on_disk)
            self.assert_same_tensors(found, {name: right[name] for name in found})
            tokens = torch.arange(1, 9)[None]
            with torch.no_grad():
                self.assertTrue(torch.equal(model(tokens).logits, whole(tokens).logits))

    @needs("peft")
    def test_peft(self):
        from peft import LoraConfig, PeftModel, get_peft_model

        self.used("peft", version_of("peft"))
        made = get_peft_model(self.load(self.real), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        made.save_pretrained(self.shards / "adapter")
        mnt = self.enter(Mount(self.shards)).path
        found = PeftModel.from_pretrained(self.load(mnt), mnt / "adapter").state_dict()
        self.assert_same_tensors(found, made.state_dict())


@needs("torch", "transformers")
class TransformersFromStores(Row):
    """From a bucket: a mount of its URL, and `tensorfs.load_file`, where that package is installed."""

    def setUp(self):
        super().setUp()
        # In a process of its own: safetensors opens files while no other thread of Python runs.
        script = Path(object_server.__file__)
        server = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(server.wait)
        self.addCleanup(server.stdin.close)
        self.url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        self.ranks = self.tmp / "ranks"
        write_rank_shards(self.ranks, self.tensors)
        (self.ranks / "config.json").write_text(json.dumps(CONFIG))
        for folder in (self.shards, self.ranks):
            for path in folder.iterdir():
                place = f"{self.url}/bucket/{folder.name}/{path.name}"
                urllib.request.urlopen(urllib.request.Request(place, path.read_bytes(), method="PUT")).close()
        keys = {"AWS_ACCESS_KEY_ID": object_server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": object_server.SECRET_KEY}
        self.env = {**os.environ, **keys, "AWS_ENDPOINT_URL": self.url, "AWS_REGION": "us-east-1", "TENSORFS_INDEX_DIR": "none"}

    def test_transformers_on_mounted_urls(self):
        from transformers import AutoModelForCausalLM

        self.used("transformers", version_of("transformers"))
        right = AutoModelForCausalLM.from_pretrained(self.real).state_dict()
        for folder in (self.shards, self.ranks):
            mnt = self.enter(Mount(f"s3://bucket/{folder.name}", f"cache-dir={self.tmp}/cache", "cache-dir-size=64M", env=self.env)).path
            self.assert_same_tensors(AutoModelForCausalLM.from_pretrained(mnt).state_dict(), right)

    @needs("tensorfs")
    def test_transformers_on_load_file_of_urls(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        import tensorfs

        right = LlamaForCausalLM.from_pretrained(self.real).state_dict()
        config = LlamaConfig.from_pretrained(self.real)
        profile = self.tmp / "profile"
        profile.write_text(f"[default]\naws_access_key_id = {object_server.ACCESS_KEY}\naws_secret_access_key = {object_server.SECRET_KEY}\n")
        how = {"credentials_file": profile, "endpoint": self.url, "region": "us-east-1"}
        for folder in (self.shards, self.ranks):
            weights = tensorfs.load_file(f"s3://bucket/{folder.name}", framework="pt", **how)
            model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype="auto")
            self.assert_same_tensors(model.state_dict(), right)


@needs("torch", "diffusers")
class Diffusers(Row):
    def test_diffusers(self):
        from diffusers import UNet2DModel

        self.used("diffusers", version_of("diffusers"))
        made = UNet2DModel(
            sample_size=8,
            block_out_channels=(32, 32),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            layers_per_block=1,
        )
        folder = self.tmp / "unet"
        made.save_pretrained(folder, max_shard_size="300KB")
        self.assertGreater(len(list(folder.glob("*.safetensors"))), 1)
        mnt = self.enter(Mount(folder)).path
        self.assertTrue((mnt / "diffusion_pytorch_model.safetensors").exists())
        self.assert_same_tensors(UNet2DModel.from_pretrained(mnt).state_dict(), made.state_dict())


@needs("huggingface_hub")
class Hub(Row):
    def test_huggingface_hub(self):
        from huggingface_hub import scan_cache_dir, snapshot_download

        self.used("huggingface_hub", version_of("huggingface_hub"))
        hub_cache(self.tmp / "hub/models--ORG--NAME", self.shards)
        mnt = self.enter(Mount(self.tmp / "hub", "layout=hub")).path
        snapshot = snapshot_download("ORG/NAME", cache_dir=mnt, local_files_only=True)
        self.assert_same_tensors(load_file(os.path.join(snapshot, "model.safetensors")), self.tensors)
        self.assertEqual([repo.repo_id for repo in scan_cache_dir(mnt).repos], ["ORG/NAME"])

    @needs("torch")
    def test_huggingface_hub_serialization(self):
        import torch
        from huggingface_hub import load_torch_model, load_state_dict_from_file

        found = load_state_dict_from_file(self.mnt / "model.safetensors")
        self.assert_same_tensors(found, self.tensors)

        class Model(torch.nn.Module):
            def __init__(self, tensors):
                super().__init__()
                for name, value in tensors.items():
                    self.register_buffer(name.replace(".", "_"), torch.zeros(value.shape, dtype=torch.float16))

            def load_state_dict(self, state, **_):
                self.loaded = dict(state)
                return torch.nn.modules.module._IncompatibleKeys([], [])

        model = Model(self.tensors)
        load_torch_model(model, self.mnt, strict=False)
        self.assert_same_tensors(model.loaded, self.tensors)


@needs("gguf")
class Gguf(Row):
    def test_gguf(self):
        from gguf.utility import SafetensorsLocal

        self.used("gguf", version_of("gguf"))
        with SafetensorsLocal(self.mnt / "model.safetensors") as found:
            read = {name: tensor.mmap_bytes().tobytes() for name, tensor in found.items()}
        self.assertEqual(read, {name: tensor.tobytes() for name, tensor in self.tensors.items()})


@needs("torch", "timm")
class Timm(Row):
    def test_timm(self):
        import timm
        import torch

        self.used("timm", version_of("timm"))
        made = timm.create_model("test_resnet", num_classes=10)
        tensors = {name: value.numpy() for name, value in made.state_dict().items()}
        write_shards(self.tmp / "timm", tensors, 2)
        mnt = self.enter(Mount(self.tmp / "timm")).path
        torch.manual_seed(5)
        found = timm.create_model("test_resnet", num_classes=10, checkpoint_path=mnt / "model.safetensors")
        self.assert_same_tensors(found.state_dict(), made.state_dict())


@needs("mlx")
class Mlx(Row):
    def test_mlx(self):
        import mlx.core as mx

        self.used("mlx", version_of("mlx"))
        found = mx.load(str(self.mnt / "model.safetensors"))
        mx.eval(found)
        self.assert_same_tensors({name: np.array(value) for name, value in found.items()}, self.tensors)


@needs("candle")
class Candle(Row):
    def test_candle(self):
        from candle.utils import load_safetensors

        self.used("candle-nn", version_of("candle-nn"))
        right, found = (load_safetensors(str(folder / "model.safetensors")) for folder in (self.real, self.mnt))
        self.assertEqual(found.keys(), self.tensors.keys())
        for name, array in self.tensors.items():
            self.assertEqual((str(found[name].dtype), found[name].shape), (str(right[name].dtype), right[name].shape))
            self.assertEqual(found[name].values(), array.tolist(), name)


@needs("mistralrs", "tokenizers")
class MistralRs(Row):
    def answer(self, folder):
        """Tokens and their probabilities of a model."""
        import mistralrs

        which = mistralrs.Which.Plain(model_id=str(folder), arch=mistralrs.Architecture.Llama, dtype=mistralrs.ModelDType.F32)
        request = mistralrs.ChatCompletionRequest(
            messages=[{"role": "user", "content": "hello"}], model="tiny", max_tokens=8, temperature=0.0, logprobs=True, top_logprobs=3
        )
        found = mistralrs.Runner(which).send_chat_completion_request(request).choices[0]
        return found.message.content, [(one.token, one.logprob) for one in found.logprobs.content]

    def test_mistral_rs(self):
        self.used("mistralrs", version_of("mistralrs"))
        write_tokenizer(self.shards)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (self.real / file).write_bytes((self.shards / file).read_bytes())
        found, right = self.answer(self.enter(Mount(self.shards)).path), self.answer(self.real)
        self.assertEqual(len(right[1]), 8)
        self.assertEqual(found, right)


@unittest.skipUnless(COMFYUI, "COMFYUI_SOURCES is not set")
@needs("torch", "einops")
class ComfyUi(Row):
    def test_comfyui(self):
        sys.path.append(COMFYUI)
        self.addCleanup(sys.path.remove, COMFYUI)
        from comfy import utils
        from comfyui_version import __version__

        self.used("ComfyUI", __version__)
        for disable_mmap in (False, True):
            with mock.patch.object(utils, "DISABLE_MMAP", disable_mmap):
                (right, facts), (found, same) = (utils.load_torch_file(str(folder / "model.safetensors"), return_metadata=True) for folder in (self.real, self.mnt))
            self.assertEqual({**facts, **same}, same)
            self.assert_same_tensors(found, right)


@needs("torch", "mergekit")
class Mergekit(Row):
    def test_mergekit(self):
        self.used("mergekit", version_of("mergekit"))
        other = self.tmp / "other"
        write_shards(other, {name: -2 * value for name, value in self.tensors.items()}, 2)
        (other / "config.json").write_bytes((self.real / "config.json").read_bytes())
        second = self.enter(Mount(other)).path
        merged = []
        for number, models in enumerate(((self.real, other), (self.mnt, second))):
            config = {
                "merge_method": "linear",
                "dtype": "float16",
                "models": [{"model": str(model), "parameters": {"weight": weight}} for model, weight in zip(models, (0.75, 0.25))],
            }
            file, out = self.tmp / f"merge-{number}.yml", self.tmp / f"merged-{number}"
            file.write_text(json.dumps(config))
            program = "from mergekit.scripts.run_yaml import main; main()"
            self.output(sys.executable, "-c", program, file, out, "--no-copy-tokenizer", "--no-write-model-card")
            merged.append({name: value for path in sorted(out.glob("*.safetensors")) for name, value in load_file(path).items()})
        self.assert_same_tensors(merged[1], merged[0])
        self.assertEqual(merged[0].keys(), self.tensors.keys())


@needs("torch", "vllm")
class Vllm(Row):
    def test_vllm(self):
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        self.used("vllm", version_of("vllm"))
        for load_format, how in (("auto", {}), ("safetensors", {"safetensors_load_strategy": "eager"}), ("safetensors", {"safetensors_load_strategy": "prefetch"})):
            loader = get_model_loader(LoadConfig(load_format=load_format, use_tqdm_on_load=False, **how))
            found = loader._get_weights_iterator(DefaultModelLoader.Source(str(self.mnt), None))
            self.assert_same_tensors(dict(found), self.tensors)


@needs("torch", "sglang")
class Sglang(Row):
    def test_sglang(self):
        from sglang.srt.model_loader import weight_utils

        self.used("sglang", version_of("sglang"))
        files = [str(self.mnt / "model.safetensors")]
        self.assertEqual(weight_utils.filter_duplicate_safetensors_files(files, str(self.mnt), "model.safetensors.index.json"), files)
        for disable_mmap in (False, True):
            found = weight_utils.safetensors_weights_iterator(files, disable_mmap=disable_mmap)
            self.assert_same_tensors(dict(found), self.tensors)
            found = weight_utils.buffered_multi_thread_safetensors_weights_iterator(files, max_workers=4, disable_mmap=disable_mmap)
            self.assert_same_tensors(dict(found), self.tensors)


@needs("torch", "keras_hub")
class Keras(Row):
    def test_keras(self):
        import keras_hub

        self.used("keras, keras_hub", f"{version_of('keras')}, {version_of('keras-hub')}")
        right, found = (
            {weight.path: weight.numpy() for weight in keras_hub.models.Backbone.from_preset(str(folder)).weights}
            for folder in (self.real, self.mnt)
        )
        self.assertGreater(len(right), 20)
        self.assert_same_tensors(found, right)


@needs("torch", "convert_hf_to_gguf", "sentencepiece")
class Converter(Row):
    def test_the_converter_of_llama_cpp(self):
        import sentencepiece
        from gguf import GGUFReader

        self.used("convert-hf-to-gguf", version_of("convert-hf-to-gguf"))
        words = (f"word{number} and {number * 7} more" for number in range(400))
        with open(self.shards / "tokenizer.model", "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=words, model_writer=file, vocab_size=VOCAB, model_type="bpe", byte_fallback=True, minloglevel=2
            )
        (self.real / "tokenizer.model").write_bytes((self.shards / "tokenizer.model").read_bytes())
        made = []
        for number, folder in enumerate((self.real, self.enter(Mount(self.shards)).path)):
            out = self.tmp / f"{number}.gguf"
            words = (folder, "--outfile", out, "--outtype", "f16", "--model-name", "tiny")
            self.output(sys.executable, "-c", "import convert_hf_to_gguf; convert_hf_to_gguf.main()", *words)
            made.append(out.read_bytes())
        self.assertEqual(made[0], made[1])
        # Each tensor and nothing else.
        self.assertEqual(len(GGUFReader(self.tmp / "1.gguf").tensors), len(self.tensors))
