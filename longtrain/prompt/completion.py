"""What the shell offers when Tab is pressed: jobs, recipes, groups, options and keys.

`longtrain completion bash` and `longtrain completion zsh` print a few lines for the shell's start-up file.
At each Tab they call `longtrain completion words WORD ...`, which reads the configuration files as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from longtrain.errors import ConfigError
from longtrain.jobs import JOBS
from longtrain.prompt.help import choices, group_keys, groups, job_keys
from longtrain.prompt.suite_help import keys_of

SHELLS = {
    "bash": """\
# longtrain: completion for bash. Add to ~/.bashrc:  eval "$(longtrain completion bash)"
_longtrain() {
  local line=${COMP_LINE:0:COMP_POINT} words
  read -r -a words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  local last=${words[${#words[@]}-1]}
  mapfile -t COMPREPLY < <(longtrain completion words "${words[@]:1}" 2>/dev/null)
  if [[ $last == *=* ]]; then # bash ends a word at =
    COMPREPLY=("${COMPREPLY[@]#"${last%%=*}="}")
  fi
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=,] ]] && compopt -o nospace
}
complete -o default -F _longtrain longtrain
""",
    "zsh": """\
# longtrain: completion for zsh. Add to ~/.zshrc, after compinit:  eval "$(longtrain completion zsh)"
_longtrain() {
  local -a offered
  offered=(${(f)"$(longtrain completion words "${(@Q)words[2,CURRENT]}" 2>/dev/null)"})
  (( $#offered )) && compadd -S '' -a offered
  if (( ! $#offered )) || [[ ${words[2]} == inspect ]]; then
    compset -P '*=' # a file for the value of a key
    _files
  fi
}
compdef _longtrain longtrain
""",
}
"""Shell -> what it evaluates once."""
OTHER_WORDS = ("config", "recipes", "completion")


def answer(words: Sequence[str]) -> str:
    """What `longtrain completion WORDS` prints.

    Args:
        words: `bash`, `zsh`, or `words` and what is typed so far, the word under the cursor last.

    Raises:
        ConfigError: another shell.
    """
    if words and words[0] == "words":
        return "".join(f"{word}\n" for word in offered(words[1:]))
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(f"completion for {' '.join(words) or 'which shell'}? allowed: {', '.join(SHELLS)}")
    return SHELLS[words[0]]


def offered(words: Sequence[str]) -> list[str]:
    """What the last word may become.

    Args:
        words: as typed after `longtrain`; the last one is unfinished, and may be empty.
    """
    *before, last = words or [""]
    job = next((word for word in before if word in JOBS), "train")
    if before == ["completion"]:
        return [shell for shell in SHELLS if shell.startswith(last)]
    options = groups()
    found = [f"+recipe={name}" for name in options["recipe"]]
    found += [
        f"{plus}{group}={name}" for group, names in options.items() for name in names for plus in ("", "+")
    ]
    if last.startswith("job="):
        found = _job_lists(last)
    if "=" in last:
        return sorted({word for word in found if word.startswith(last)})
    found = ["+recipe=", *(f"{group}=" for group in options if group not in ("recipe", "debug")), "+debug="]
    if not before:
        found += [*JOBS, *OTHER_WORDS]
    elif before == ["config"]:
        found += list(JOBS)
    found += [f"{key}=" for key in keys(job, before)]
    return sorted({word for word in found if word.startswith(last)})


def _job_lists(word: str) -> list[str]:
    """What `job=` may become: a job, or a list whose last one is being typed."""
    begun = word[: max(word.rfind("["), word.rfind(",")) + 1]
    if not begun:
        return [f"job={opened}{name}" for name in JOBS for opened in ("", "[")]
    ends = (",", "]") if "[" in begun else ("",)
    return [f"{begun}{name}{end}" for name in JOBS for end in ends]


def keys(job: str, words: Sequence[str] = ()) -> list[str]:
    """The keys that a command may set: the job's, and those of the groups as the words choose them."""
    taken, known = choices(job, words), groups()
    found = _names(job_keys(job))
    for group, option in taken.items():
        if option in known[group] and group not in ("recipe", "debug"):
            lines = keys_of(option).splitlines() if group == "suite" else group_keys(group, option)
            found += _of_suite(lines) if group == "suite" else [f"{group}.{key}" for key in _names(lines)]
    return [key for key in found if key not in known]


def _names(lines: Sequence[str]) -> list[str]:
    return [match[1] for line in lines if (match := re.match(r"(\w+):", line))]


def _of_suite(lines: Sequence[str]) -> list[str]:
    """Top keys of a suite's help, and those below `suite:`."""
    found = [(match[1], match[2]) for line in lines if (match := re.match(r"  (  )?(\w+):", line))]
    return [f"suite.{key}" if inside else key for inside, key in found if key != "suite"]
