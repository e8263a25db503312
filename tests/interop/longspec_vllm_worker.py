"""Run in an environment with vLLM for CPUs: what it drafts with a LongSpec artifact, cycle by cycle.

python longspec_vllm_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys


def main(job_path: str, result_path: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with open(job_path) as stream:  # noqa: PTH123
        job = json.load(stream)
    sys.path.insert(0, job["folder_of_proposer"])
    import longspec_vllm
    from vllm import LLM, SamplingParams

    seen: list[list[list[int]]] = []
    chains = longspec_vllm.LongSpecProposer._chains

    def watched(self, *args):
        drafted = chains(self, *args)
        seen.append(drafted.tolist())
        return drafted

    longspec_vllm.LongSpecProposer._chains = watched
    llm = LLM(
        model=job["target"],
        speculative_config={
            "method": "custom_class",
            "model": "longspec_vllm.LongSpecProposer",
            "num_speculative_tokens": job["drafted"],
        },
        additional_config={"longspec": job["artifact"]},
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=job["batched_tokens"],
        enable_chunked_prefill=True,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        max_num_seqs=4,
        seed=0,
    )
    asked = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    alone = []
    for prompt in job["prompts"]:
        start = len(seen)
        (made,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        drafted = [chain for batch in seen[start:] for chain in batch]
        alone.append({"tokens": list(made.outputs[0].token_ids), "drafted": drafted})
    start = len(seen)
    together = llm.generate([{"prompt_token_ids": one} for one in job["prompts"]], asked, use_tqdm=False)
    result = {
        "alone": alone,
        "together": [list(made.outputs[0].token_ids) for made in together],
        "drafted_together": sorted(chain for batch in seen[start:] for chain in batch),
    }
    with open(result_path, "w") as stream:  # noqa: PTH123
        json.dump(result, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
