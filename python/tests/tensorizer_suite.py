"""Runs tests of the tensorizer package against `tensorfs.compat.tensorizer`.

    python python/tests/tensorizer_suite.py CHECKOUT/tests [test_torch_compat test_serialization ...]

The models that the tests download are replaced by a model with random weights, so the text that it generates has no
meaning.
"""

import argparse
import sys
import types
import unittest

import torch
import transformers

from tensorfs.compat import tensorizer as ours

# Tests that cannot apply: they need a network, or more than 10 GB of memory.
LEFT_OUT = ("s3", "redis", "large_unbuffered")


class Tokenizer:
    """A tokenizer that makes numbers in place of words, because words have no meaning for random weights."""

    eos_token_id = 2

    def encode(self, text, return_tensors):
        return torch.randint(3, 3999, (1, 40))

    def decode(self, tokens, skip_special_tokens):
        return " hello" * 500


def stand_in():
    """Makes `import tensorizer` find the replacement in tensorfs."""
    for name in ("serialization", "stream_io", "torch_compat", "utils"):
        sys.modules[f"tensorizer.{name}"] = getattr(ours, name)
    sys.modules["tensorizer"] = ours
    sys.modules["tensorizer._crypt"] = types.SimpleNamespace(available=True)
    sys.modules["test_stream_io"] = types.SimpleNamespace(start_redis=None, teardown_redis=None)
    # Internal names of the package that tests import.
    ours.serialization.TensorHash = None
    ours.stream_io._s3_default_config_paths = ours.stream_io.default_s3_read_endpoint = ()
    ours.torch_compat._LOAD_WRAPPER_DEFAULT_MODULE = None


def random_models():
    """Makes transformers create a small model in place of a downloaded one."""
    config = transformers.GPTNeoConfig(
        vocab_size=4000, max_position_embeddings=512, hidden_size=512, num_layers=6, num_heads=8,
        attention_types=[[["global", "local"], 3]], bos_token_id=1, eos_token_id=2,
    )

    def model(*_, **__):
        state = torch.get_rng_state()
        torch.manual_seed(7)
        made = transformers.GPTNeoForCausalLM(config)
        torch.set_rng_state(state)
        return made

    transformers.AutoModelForCausalLM.from_pretrained = staticmethod(model)
    transformers.AutoConfig.from_pretrained = staticmethod(lambda *_, **__: config)
    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *_, **__: Tokenizer())


def cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        elif not any(word in test.id() for word in LEFT_OUT):
            yield test


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the folder tests of a checkout of coreweave/tensorizer")
    parser.add_argument("modules", nargs="*", default=["test_torch_compat", "test_serialization"])
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.folder)
    stand_in()
    random_models()
    suite = unittest.TestSuite(cases(unittest.defaultTestLoader.loadTestsFromNames(arguments.modules)))
    return not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
