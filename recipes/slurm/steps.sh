# Functions of the Slurm scripts beside this file, which source it: a step on every node, and a job that goes on by itself.
# shellcheck shell=bash
#
# `resumable` runs a step and requeues its job, which then goes on where it was,
#   - when its time is nearly up: Slurm then sends USR1 to the script (--signal=B:USR1@SECONDS), or you do, at any time:
#     scancel --batch --signal=USR1 JOB
#   - when the job is preempted, and
#   - when the step failed: a process was killed, a GPU or a link failed,
# each time only if this session saved something new. A job that gains nothing ends with its error, so that none runs in circles.
# A node that is lost with all that is on it needs no script: Slurm itself requeues the job (--requeue).

LEAVE_SIGNAL=${LEAVE_SIGNAL:-USR1} # what asks the step to save and to leave
LAST_SECONDS=20 # before the time limit: by then the job is requeued even if the step did not end

session=${SLURM_RESTART_COUNT:-0}
logs=$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p "$logs"
# sed reads all names; head would leave after the first and, where they are very many, end this script by a broken pipe
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below the ports that systems give to outgoing connections
export MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # since Slurm 22.05 srun does not ask sbatch's option for it
trap : USR1 # until a step runs that can save

note() {
  echo "$(date '+%F %T') $*"
}

step() { # step NAME COMMAND...: on every node and rank; the first process that fails ends all; rank 0 is heard in the job's log too
  heard="$logs/$1-$session.${MASTER_ADDR%%.*}-0.log"
  note "$1 session=$session nodes=$SLURM_JOB_NODELIST logs=$logs/$1-$session.NODE-RANK.log"
  : >"$heard"
  srun --kill-on-bad-exit=1 --distribution=block --open-mode=append --output="$logs/$1-$session.%N-%t.log" "${@:2}" &
  running=$!
  tail --pid="$running" -n +1 -F "$heard" 2>/dev/null &
  hearing=$!
}

ended() { # wait for the step; leaves its exit code in `code`
  while
    wait "$running" && code=0 || code=$? # a trapped signal ends this wait early
    kill -0 "$running" 2>/dev/null
  do :; done
  wait "$hearing" || true
  if ((code)) && ! grep -q 'longtrain: error' "$heard"; then # rank 0 had nothing to say
    grep -h 'longtrain: error' "${heard%."${MASTER_ADDR%%.*}"-0.log}".*.log | sort | uniq | head -n 3 || true
  fi
  if [[ -n ${timer:-} ]]; then
    kill "$timer" 2>/dev/null || true
  fi
}

leave() { # the time is nearly up: the step saves at the end of its optimizer step
  leaving=1
  local told end left
  told=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null || true)
  end=$(date -d "${told:-unknown}" +%s 2>/dev/null || echo 0) # to date an empty word means the midnight that was
  left=$((end - $(date +%s) - LAST_SECONDS))
  note "time limit: the step is asked to save and to leave"
  scancel --signal="$LEAVE_SIGNAL" "$SLURM_JOB_ID" || true # every rank of the step gets it, this script does not
  if ((end > 0)); then
    (sleep "$((left > 0 ? left : 0))" && kill -KILL "$running") 2>/dev/null &
    timer=$!
  fi
}

saved() { # a sum of the checkpoints, answers and finished examples that resumable's paths hold now; of an array's task its part's alone
  local names=(-name last.ckpt -o -name '*.jsonl')
  if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # examples of part 3 are in NAME.3.jsonl, its answers in NAME.3-of-8.jsonl
    names=(-name "*.$SLURM_ARRAY_TASK_ID.jsonl" -o -name "*.$SLURM_ARRAY_TASK_ID-of-*.jsonl")
  fi
  { find "${watched[@]}" \( "${names[@]}" \) -printf '%p %s %T@\n' 2>/dev/null || true; } | sort | cksum
}

resumable() { # resumable PATH... -- NAME COMMAND...: a step that saves below these folders
  local before why=""
  watched=()
  while [[ $1 != -- ]]; do
    watched+=("$1")
    shift
  done
  shift
  before=$(saved)
  leaving=0
  trap leave USR1
  step "$@"
  ended
  trap : USR1
  if ((leaving)); then
    why="time limit"
  elif [[ $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    why="preempted"
  elif ((code)); then
    why="$1 ended with exit code $code"
  fi
  if [[ -z $why ]]; then
    note "$1 done"
  elif [[ $before != "$(saved)" ]]; then
    requeue "$why"
  else
    note "not requeued: $why, and nothing new was saved in this session; give it more time (--time, --signal=B:USR1@SECONDS) or" \
      "read $logs/$1-$session.*.log"
    exit "$((code ? code : 1))"
  fi
}

requeue() { # requeue WHY
  if [[ ! $(scontrol show job "$SLURM_JOB_ID") =~ JobState=RUNNING ]]; then
    note "not requeued: the job was cancelled"
    exit 1
  fi
  note "requeued: $1"
  scontrol requeue "$SLURM_JOB_ID" || {
    note "Slurm refused to requeue the job; submit it again, it goes on where it was"
    exit 1
  }
  sleep 600 # until Slurm ends this script
}

array_part() { # array_part KEY=VALUE...: in `part` the words that an array's task adds: it is the part of its number
  local word shards=""
  # shellcheck disable=SC2034 # the scripts use it
  part=()
  if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
    return
  fi
  for word in "$@"; do
    if [[ $word == shards=* ]]; then
      shards=${word#shards=}
    fi
  done
  if [[ ! $shards =~ ^[1-9][0-9]*$ ]]; then
    echo "an array does parts: say how many there are in all, e.g. --array=0-7 and shards=8" >&2
    exit 2
  fi
  if [[ ${SLURM_ARRAY_TASK_STEP:-1} != 1 ]]; then
    echo "--array with a step of $SLURM_ARRAY_TASK_STEP leaves parts out; pass --array=0-$((shards - 1))" >&2
    exit 2
  fi
  if ((SLURM_ARRAY_TASK_ID >= shards)); then
    echo "part $SLURM_ARRAY_TASK_ID of shards=$shards; parts are 0 to $((shards - 1)): pass --array=0-$((shards - 1))" >&2
    exit 2
  fi
  # shellcheck disable=SC2034
  part=("shard=$SLURM_ARRAY_TASK_ID")
}
