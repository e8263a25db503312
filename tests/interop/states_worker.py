"""Run in an environment with speculators: what its own code makes of our rows and of files of states.

python states_worker.py ROWS.jsonl TARGET STATES DATA RESULT.safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from speculators.cli.prepare_data import prepare_data
from speculators.data_generation.offline import check_hidden_states
from speculators.train.data import ArrowDataset


def main(rows: str, target: str, states: str, data: str, result: str) -> None:
    prepare_data(
        model=target,
        data=[rows],
        output=data,
        seq_length=512,
        max_samples=None,
        token_freq_path=None,
        render_endpoint=None,
        seed=0,
        num_preprocessing_workers=1,
        minimum_valid_tokens=None,
        overwrite=False,
        allow_empty_output=False,
        trust_remote_code=False,
        skip_token_freq=True,
    )
    (Path(data) / "hidden_states").mkdir()
    known = {
        tuple(load_file(file)["token_ids"].tolist()): file for file in Path(states).glob("*.safetensors")
    }
    plain = ArrowDataset(512, data, on_missing="raise")
    for number, row in enumerate(plain.data):  # as its generator moves what the server wrote
        ids = row["input_ids"].tolist()
        check_hidden_states(load_file(known[tuple(ids)]), ids)
        known[tuple(ids)].rename(Path(data) / "hidden_states" / f"hs_{number}.safetensors")
    found = {}
    for number in range(len(plain)):
        found |= {f"{number}.{name}": value.contiguous() for name, value in plain[number].items()}
    save_file(found, result)
    sys.stdout.write(json.dumps(len(plain)))


if __name__ == "__main__":
    main(*sys.argv[1:])
