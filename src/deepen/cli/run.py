"""`deepen run`: generate text with a program; writes no file."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import deepen
from deepen.cli.options import KEEPING, Keeping
from deepen.cli.output import give, note, program_text
from deepen.errors import FamilyError, UsageError
from deepen.probe.windows import require_context

if TYPE_CHECKING:
    from deepen.checkpoint.load import PreTrainedModel, PreTrainedTokenizerBase


def run(
    model: str,
    program: str = "",
    /,
    *,
    prompt: Annotated[str, Parameter(help="What to continue or answer.")],
    tokens: Annotated[int, Parameter(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, Parameter(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, Parameter(help="Of the draws, when the temperature is not 0.")] = 0,
    counts: Annotated[str, Parameter(help="Counts of the loops n..m, such as 2,3; one number sets all.")] = "",
    chat: Annotated[bool, Parameter(help="Use the chat template when the tokenizer has one.")] = True,
    common: Keeping = KEEPING,
) -> None:
    """Generate text with a program, streamed to the terminal.

    Parameters
    ----------
    model
        A checkpoint folder, a .gguf file or a hub id.
    program
        Such as '0-3 (4-7)*2 8-11', or @FILE; the model's own when none is given.
    """
    from deepen.program import read_program

    if tokens < 1:
        raise UsageError(f"--tokens {tokens}: expected at least 1")
    if not temperature >= 0:
        raise UsageError(f"--temperature {temperature}: expected 0 or more")
    device = common.torch_device()
    opened = deepen.open(model)
    checkpoint = opened.apply(read_program(program, common.form)) if program else opened
    tokenizer = checkpoint.tokenizer()
    loaded = checkpoint.load(dtype=common.torch_dtype(), device=device)
    if not loaded.can_generate() or loaded.main_input_name != "input_ids":
        raise FamilyError(f"{type(loaded).__name__} generates no text from a prompt; deepen eval and show take it")
    if counts:
        checkpoint.require_layers()
        choose_counts(loaded, counts)
    ids, templated = encode(tokenizer, prompt, chat and not loaded.config.is_encoder_decoder)
    if ids.shape[1] == 0:
        raise UsageError("--prompt gives no token; write some text")
    if not loaded.config.is_encoder_decoder:
        require_context(loaded.config, ids.shape[1] + tokens)
    stream = Stream(tokenizer, quiet=common.json)
    generate(loaded, tokenizer, ids, stream, tokens=tokens, temperature=temperature, seed=seed)
    document = {
        "model": model,
        "program": program_text(checkpoint),
        "prompt": prompt,
        "chat_template": templated,
        "text": stream.text,
        "tokens": stream.count,
        "prompt_tokens": ids.shape[1],
        "seconds": stream.seconds,
        "tokens_per_second": stream.rate,
    }
    if not give(common, "run", document):
        rate = f", {stream.rate:.3g} tokens/s after the first" if stream.count > 1 else ""
        note(f"{stream.count} tokens in {stream.seconds:.1f} s{rate}")


def choose_counts(model: Any, text: str) -> None:
    """Sets the counts of the loops `n..m`, tower by tower in text order.

    Raises:
        UsageError: not numbers, or not as many as there are such loops.
        ProgramError: a count outside its range.
    """
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        raise UsageError(f"--counts {text!r}: expected whole numbers, such as 2,3") from None
    plans = model.deepen.plans
    loops = [(tower, loop) for tower, plan in plans.items() for loop in plan.loops if loop.minimum != loop.maximum]
    if not loops:
        raise UsageError(f"--counts {text}: the program {model.deepen.program} has no loop n..m")
    if len(counts) == 1:
        counts *= len(loops)
    if len(counts) != len(loops):
        names = ", ".join(loop.text for _, loop in loops)
        raise UsageError(f"--counts {text}: expected {len(loops)} counts, one for each of {names}; got {len(counts)}")
    for tower in plans:
        chosen = {loop.number: count for (name, loop), count in zip(loops, counts, strict=True) if name == tower}
        if chosen:
            model.deepen.set_counts(chosen, tower)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> tuple[Any, bool]:
    """Tokens of the prompt, [1, t], and whether a chat template was applied."""
    if not (chat and tokenizer.chat_template):
        return tokenizer(prompt, return_tensors="pt").input_ids, False
    messages = [{"role": "user", "content": prompt}]
    found: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return found["input_ids"], True


class Stream:
    """Takes tokens as `generate` makes them and prints the text as soon as its words are whole.

    Text that a later token may still change, an unfinished character or word, is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, quiet: bool = False) -> None:
        self.tokenizer, self.quiet = tokenizer, quiet
        self.ids: list[int] = []
        self.times: list[float] = []
        self.printed = 0
        self.begun = False

    def put(self, value: Any) -> None:
        # generate puts the prompt first
        if not self.begun:
            self.begun = True
            self.started = time.perf_counter()
            return
        self.times.append(time.perf_counter())
        self.ids.extend(value.flatten().tolist())
        text = self.text
        self._print(text if text.endswith("\n") else text[: text.rfind(" ") + 1])

    def end(self) -> None:
        self._print(self.text)
        if not self.quiet:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _print(self, text: str) -> None:
        if not self.quiet and len(text) > self.printed:
            sys.stdout.write(text[self.printed :])
            sys.stdout.flush()
            self.printed = len(text)

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True))

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.started if self.times else 0.0

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first one, which also reads the prompt."""
        spent = self.times[-1] - self.times[0] if self.times else 0.0
        return (self.count - 1) / spent if spent > 0 else None


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Any,
    stream: Stream,
    *,
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """Generates up to `tokens` tokens into `stream`; the settings of the checkpoint decide where a text ends."""
    import torch

    # a fresh one of its class: what else the checkpoint stores there (sampling, penalties) is not part of the program
    stored: Any = model.generation_config
    ends = stored.eos_token_id if isinstance(stored.eos_token_id, list) else [stored.eos_token_id]
    stops = sorted({end for end in (*ends, tokenizer.eos_token_id) if isinstance(end, int)})
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
    settings = type(stored)(
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        eos_token_id=stops or None,
        bos_token_id=stored.bos_token_id,
        pad_token_id=stored.pad_token_id if stored.pad_token_id is not None else (stops or [0])[0],
        decoder_start_token_id=stored.decoder_start_token_id,
        use_cache=stored.use_cache,
        **sampling,
    )
    torch.manual_seed(seed)
    ids = ids.to(model.device)
    decode: Any = model.generate
    # transformers fills what a given config leaves open from the model's own, so for a while that is this one
    model.generation_config = settings
    try:
        with torch.inference_mode():
            decode(ids, attention_mask=torch.ones_like(ids), streamer=stream)
    finally:
        model.generation_config = stored
