"""Run in an environment with vLLM for CPUs: what it drafts with a folder, cycle by cycle.

python vllm_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys


def main(job_path: str, result_path: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    with open(job_path) as stream:  # noqa: PTH123
        job = json.load(stream)
    seen: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def watched(self, *args, **kwargs):
        drafted = propose(self, *args, **kwargs)
        seen.append(drafted[0].tolist())
        return drafted

    SpecDecodeBaseProposer.propose = watched
    speculative = {"model": job["draft"], "method": "eagle3", "num_speculative_tokens": job["drafted"]}
    llm = LLM(
        model=job["target"],
        speculative_config=speculative,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        max_num_seqs=1,
        seed=0,
    )
    seen.clear()
    results = []
    for prompt in job["prompts"]:
        start = len(seen)
        asked = SamplingParams(
            temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
        )
        made = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        results.append({"tokens": list(made[0].outputs[0].token_ids), "drafted": seen[start:]})
    with open(result_path, "w") as stream:  # noqa: PTH123
        json.dump(results, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
