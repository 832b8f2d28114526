import pytest
from tokenizers import Tokenizer

from tools.tiny_model.batches import SYSTEM_PROMPTS
from tools.tiny_model.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer(SYSTEM_PROMPTS)
