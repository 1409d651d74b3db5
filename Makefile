# Hidden states of a large model for every token of a chat data set, into S3. `make` alone explains.
# Your own values go into local.mk (untracked), as `MODEL = Qwen/Qwen3.6-27B`, or onto the command line.
-include local.mk

# MODEL: target model, a directory or a hub id
MODEL ?=
# DATA: chats or token ids: JSONL or Parquet, a file or a directory, or a saved data set
DATA ?=
# OUT: where the states go, s3://bucket/prefix or a directory
OUT ?=
# GPUS: shards, one a GPU
GPUS ?= $(or $(filter-out 0,$(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)),1)
# WORK: plan, markers, progress, logs of this run
WORK ?= work
# STAGE: staging directory, best in memory
STAGE ?= /dev/shm/hidden-states
# LAYERS: ids as 1,16,31,46,61, a rule (dflash:5, eagle3), or a drafter's config
LAYERS ?= dflash:5
# TOKENS: tokens of a batch
TOKENS ?= 32768
# MAX_LEN: tokens of the longest sample, at most TOKENS
MAX_LEN ?= 4096
# UPLOADS: `aws s3 cp` processes a shard
UPLOADS ?= 2
# UPLOAD_MBPS: megabytes per second of a shard's uploads together, 0 for no limit
UPLOAD_MBPS ?= 0
# PORT: port on 127.0.0.1 of the demo's S3 server
PORT ?= 9123
# WEB_PORT: port of the page of `make web`; PORT, where you give that one
WEB_PORT ?= $(if $(filter file,$(origin PORT)),8080,$(PORT))
# WEB_HOST: address of the page; any but loopback needs WEB_TOKEN=, a secret of 16 characters, best in local.mk
WEB_HOST ?= 127.0.0.1
# NODES: nodes of `make slurm`; it starts NODES x GPUS shards, wherever Slurm finds a GPU for them
NODES ?= 1
# SBATCH: more options for sbatch, as SBATCH="--partition=gpu --time=8:00:00"
SBATCH ?=
# ARGS: more flags for extract.py, as ARGS="--final --dtype fp8"
ARGS ?=
# TO: where `make export` puts a trainer's files
TO ?= $(WORK)/export
# FORMAT: whose files they are: speculators, specforge or modelopt
FORMAT ?= speculators
# ALGORITHM: what that trainer trains: dflash, dspark or eagle3
ALGORITHM ?= dflash
# SAMPLES: samples that `make verify` recomputes, or all
SAMPLES ?= 100
# DTYPE: how `make verify` runs the model, fp32 or bf16; auto: fp32 where it fits into memory
DTYPE ?= auto
# DEVICE: where `make verify` runs it, cpu or cuda; empty: a GPU if there is one
DEVICE ?=
# SHARD: whose log `make logs` follows
SHARD ?= 0
# PY: the Python that runs everything; set it to use an environment of your own instead of .venv
PY ?= .venv/bin/python

KNOBS := MODEL DATA OUT LAYERS TOKENS MAX_LEN - GPUS WORK STAGE UPLOADS UPLOAD_MBPS ARGS - NODES SBATCH - WEB_PORT \
         WEB_HOST SHARD SAMPLES DTYPE DEVICE TO FORMAT ALGORITHM PORT PY
# A name on the command line that is nearly a knob's is a slip, and a run with defaults is not what was asked for.
SLIPS := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$(filter-out $(KNOBS) WEB_TOKEN,$v)))
$(foreach v,$(SLIPS),$(foreach near,$(shell python3 -c 'import difflib, sys; \
  print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], 1, .75))' '$v' $(filter-out -,$(KNOBS))), \
  $(error $v= is no knob; the nearest is $(near). `make` alone lists them)))
# Recipes put values between quotes, and programs take a leading dash for a flag. GPUS' default would ask the GPUs.
bad = $(strip $(filter -%,$(firstword $1)) $(foreach c,' " ` $$,$(findstring $c,$1)))
raw = $(if $(filter file,$(origin $1)),$($1),$(value $1))
$(foreach k,$(filter-out - ARGS SBATCH $(if $(filter file,$(origin GPUS)),GPUS),$(KNOBS)),$(if $(call bad,$(call raw,$k)), \
  $(error $k=$(call raw,$k), from the $(origin $k), is refused: no quotes, no dollar signs, no leading dash (a path: ./-x))))
$(foreach k,WORK STAGE TO PY,$(if $(strip $($k)),,$(error $k= is empty)))
# A line of local.mk may end in a blank or a comment, and begin with the home directory.
$(foreach k,MODEL DATA OUT WORK STAGE TO,$(if $(filter file,$(origin $k)),$(eval $k := $(patsubst ~/%,$(HOME)/%,$(strip $($k))))))
export WEB_TOKEN
SHAPE = --model '$(MODEL)' --work '$(WORK)' --layers '$(LAYERS)' --tokens '$(TOKENS)' --max-len '$(MAX_LEN)'
FLAGS = $(SHAPE) --data '$(DATA)' --out '$(OUT)' --stage '$(STAGE)' --uploads '$(UPLOADS)' \
        --upload-mbps '$(UPLOAD_MBPS)' --num-shards '$(GPUS)'
EXTRACT = $(PY) extract.py $(FLAGS) $(ARGS)
WARMUP = $(PY) warmup.py $(SHAPE) $(ARGS)
MONITOR = $(PY) monitor.py --work '$(WORK)' --stage '$(STAGE)'
VENV := $(if $(filter file,$(origin PY)),$(if $(filter .venv/bin/python,$(PY)),.venv/.installed))
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu bench bench-gpu plan warmup extract status watch web logs snapshot stop restart \
        clean-shm reconcile verify export drill train-demo slurm simulate

# ---- start here
help:  ## this text
	@echo 'make TARGET [KNOB=value ...]'
	awk '/^# ---- / { print "\n" toupper(substr($$0, 8, 1)) substr($$0, 9) }
	     match($$0, /^[a-z-]+:.*## /) { printf "  %-10s %s\n", substr($$0, 1, index($$0, ":") - 1), substr($$0, RLENGTH + 1) }' Makefile
	echo; echo 'Knobs, with their values now (yours go into local.mk)'
	$(foreach k,$(KNOBS),$(if $(filter -,$k),echo;,printf '  %-12s %-26s %s\n' '$k' '$(subst ','\'',$($k))' \
	  "$$(sed -n 's/^# $k: //p' Makefile)";))

.venv/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Python 3.11 or newer is needed'; exit 2; }
	echo 'Installing requirements.txt into .venv (minutes, once)'
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt || {
	  echo 'pip could not install requirements.txt: mend what it names above, then make setup goes on'; exit 2
	}
	touch $@

setup: $(VENV)  ## make .venv and install requirements.txt into it
	@$(PY) -c 'import torch; print("torch", torch.__version__, "| GPUs:", torch.cuda.device_count())'

# ---- a run

plan: $(VENV)  ## tokenize, fix the batches, print samples, bytes and time; no GPU, nothing into OUT
	@CUDA_VISIBLE_DEVICES= $(EXTRACT) --plan-only

warmup: $(VENV)  ## compile and prove the kernels once
	@$(WARMUP)

# A pid file alone proves nothing, since pids are reused: monitor.py looks at the process, too.
define RUNNING
	command -v $(PY) >/dev/null || { echo '$(PY) is not there: make setup'; exit 2; }
	running() { $(PY) monitor.py --work '$(WORK)' --pids | xargs; }
	jobs=$$(command -v squeue >/dev/null && sed -n 's/{"plan": \([0-9]*\), "array": \([0-9]*\).*/\1,\2/p' '$(WORK)'/slurm.json 2>/dev/null || true)
	queued() { [ -z "$$jobs" ] || { squeue -hrj "$$jobs" -o %i 2>&1 || true; } | sed '/Invalid job id/d' | xargs; }  # or its error
endef

# One at a time: the lock is held until the shards are there.
define LAUNCH
	mkdir -p '$(WORK)'/logs '$(WORK)'/pids
	exec 9>>'$(WORK)'/.launch
	who=$$(echo $$(running) $$(queued))
	if [ -n "$$who" ] || ! flock -n 9; then
	  echo "a run of $(WORK) is under way or being started$${who:+ ($$who)}: make status, make stop"; exit 2
	fi
	: >'$(WORK)'/.launch
endef

extract: $(VENV)  ## run GPUS shards in the background and follow them; Ctrl-C leaves them running
	@$(RUNNING)
	[[ '$(GPUS)' =~ ^[1-9][0-9]*$$ ]] || { echo 'GPUS=$(GPUS) is not a number of shards'; exit 2; }
	$(LAUNCH)
	echo $$$$ >'$(WORK)'/.launch  # for make stop, which ends what runs in the foreground here, too
	trap "echo 'stopped before a shard was started; the same make extract goes on'; exit 3" TERM
	visible="$${CUDA_VISIBLE_DEVICES-$$(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p' || true)}"
	if [ -z "$${CUDA_VISIBLE_DEVICES+set}" ] && [ -z "$$visible" ]; then  # no nvidia-smi: torch may know
	  visible=$$($(PY) -c 'import torch; print(*range(torch.cuda.device_count()))')
	fi
	read -ra devices <<<"$$(tr ',\n' '  ' <<<"$$visible")"
	if (( $${#devices[@]} && $${#devices[@]} < $(GPUS) )); then
	  echo "GPUS=$(GPUS), but only $${#devices[@]} to see ($${devices[*]}): use GPUS=$${#devices[@]}"; exit 2
	fi
	CUDA_VISIBLE_DEVICES= $(EXTRACT) --plan-only 9>&-
	echo 'warming up, minutes on a GPU for the first time: tail -f $(WORK)/logs/warmup.log'
	CUDA_VISIBLE_DEVICES="$${devices[0]-}" $(WARMUP) --if-needed >'$(WORK)'/logs/warmup.log 2>&1 9>&- || {
	  tail -n 20 '$(WORK)'/logs/warmup.log
	  echo 'warm-up failed, no shard was started; all of it: $(WORK)/logs/warmup.log'; exit 2
	}
	trap : TERM; : >'$(WORK)'/.launch  # from here on all are started, and make stop waits to end them
	rm -f '$(WORK)'/progress_shard_*.json '$(WORK)'/pids/shard_*.pid '$(WORK)'/slurm.json
	for (( i = 0; i < $(GPUS); i++ )); do
	  CUDA_VISIBLE_DEVICES="$${devices[i]-}" setsid nohup $(EXTRACT) --shard $$i \
	    >>'$(WORK)'/logs/shard_$$i.log 2>&1 </dev/null 9>&- &
	  echo $$! >'$(WORK)'/pids/shard_$$i.pid
	  disown 2>/dev/null || true  # or bash would print the whole command of one that is killed
	done
	exec 9>&-; trap - TERM
	code=0
	$(MONITOR) --follow --num-shards $(GPUS) || code=$$?
	for (( n = 0; n < 50 && code != 130; n++ )); do  # their last words are out: they are about to leave
	  [ -n "$$(running)" ] || break
	  sleep 0.2
	done
	exit $$code

slurm: $(VENV)  ## the same as a job array of Slurm: a job that plans, then NODES x GPUS shards, requeued on failure
	@$(RUNNING)
	[[ '$(NODES) $(GPUS)' =~ ^[1-9][0-9]*\ [1-9][0-9]*$$ ]] || { echo 'NODES=$(NODES) GPUS=$(GPUS): give two numbers'; exit 2; }
	[[ -n '$(MODEL)' && -n '$(DATA)' && -n '$(OUT)' ]] || { echo 'slurm: MODEL=, DATA= and OUT= are needed'; exit 2; }
	command -v sbatch >/dev/null || { echo 'no sbatch here: make slurm is for a login node of a Slurm cluster'; exit 2; }
	$(LAUNCH)
	work=$$(realpath '$(WORK)')
	cat >'$(WORK)'/slurm.sh <<'END'
	#!/bin/bash
	# Written by make slurm. Slurm runs it once without a task's number, to plan, then once a shard.
	cd '$(CURDIR)' || exit
	if [ -z "$$SLURM_ARRAY_TASK_ID" ]; then
	  CUDA_VISIBLE_DEVICES= exec $(EXTRACT) --plan-only
	fi
	# what one node compiled the next one of its kind finds, where WORK is shared
	export TRITON_CACHE_DIR="$${TRITON_CACHE_DIR:-$$(realpath '$(WORK)')/kernels/triton}"
	export TORCHINDUCTOR_CACHE_DIR="$${TORCHINDUCTOR_CACHE_DIR:-$$(realpath '$(WORK)')/kernels/inductor}"
	export TILELANG_CACHE_DIR="$${TILELANG_CACHE_DIR:-$$(realpath '$(WORK)')/kernels/tilelang}"
	$(WARMUP) --if-needed || exit
	# a lost node's lock outlives it for a while; then exec, so that TERM reaches Python
	flock -w 300 '$(WORK)'/pids/shard_$$SLURM_ARRAY_TASK_ID.pid true
	exec $(EXTRACT) --shards-here '$(GPUS)' --shard auto
	END
	submit() { sbatch --parsable --requeue --open-mode=append --ntasks=1 --cpus-per-task=4 "$$@" $(SBATCH) '$(WORK)'/slurm.sh; }
	plan=$$(submit --job-name=hidden-states-plan --output="$$work/logs/plan.log")
	plan=$${plan%;*}
	array=$$(submit --job-name=hidden-states --output="$$work/logs/shard_%a.log" --array=0-$$(( $(NODES) * $(GPUS) - 1 )) \
	  --gpus-per-task=1 --signal=B:TERM@60 --dependency=afterok:$$plan --kill-on-invalid-dep=yes) || { scancel $$plan; exit 2; }
	shards=$$(( $(NODES) * $(GPUS) ))
	echo '{"plan": '$$plan', "array": '$${array%;*}', "shards": '$$shards'}' >'$(WORK)'/slurm.json
	# what an earlier run left; a task of this one may have begun
	find '$(WORK)' '$(WORK)'/pids -maxdepth 1 \( -name 'progress_shard_*.json' -o -name 'shard_*.pid' \) \
	  ! -newer '$(WORK)'/slurm.sh -delete
	(( shards == 1 )) && shards+=' shard' || shards+=' shards'
	echo "Slurm has job $$plan, which plans, then array $${array%;*} of $$shards: make status, make stop"

# ---- look at it
status:  ## how the run is: a row a shard, what holds it back, the box, one ETA
	@$(RUNNING)
	$(MONITOR)

watch:  ## the same, redrawn
	@$(RUNNING)
	$(MONITOR) --watch

web: $(VENV)  ## a page of it with curves, and /metrics for Prometheus
	@$(MONITOR) --web --host '$(WEB_HOST)' --port '$(WEB_PORT)'

logs:  ## follow the log of shard SHARD
	@log='$(WORK)'/logs/shard_$(SHARD).log
	[ -f "$$log" ] || {
	  echo "no $$log: is WORK=$(WORK) SHARD=$(SHARD) what was meant? There is:" '$(WORK)'/logs/*; exit 2
	}
	tail -n 50 -F "$$log"

snapshot: $(VENV)  ## keep how it looks now (scripts, versions, knobs, logs' ends, curves) before the next change
	@$(MONITOR) --snapshot \
	  "$$($(foreach k,$(filter-out -,$(KNOBS)),echo '$k = $(subst ','\'',$($k))';))"

# ---- end it, go on, check it
stop:  ## end the shards, or what prepares them, with TERM and wait: they finish their batch and can go on later
	@$(RUNNING)
	if [ -n "$$(queued)" ]; then
	  echo "asking Slurm's jobs $$jobs to stop"
	  scancel --state=PENDING $${jobs//,/ } 2>/dev/null || true  # some may be over
	  scancel --batch --signal=TERM $${jobs//,/ } 2>/dev/null || true  # they drain, however short KillWait is
	  until [ -z "$$(queued)" ]; do
	    (( SECONDS < 60 )) || { echo "still queued after 60 s: $$(queued): cancelled"; scancel $${jobs//,/ }; exit 1; }
	    sleep 1
	  done
	  echo 'stopped; the same make slurm goes on'; exit
	fi
	end() {  # the processes that a function names
	  pids=$$($$1)
	  [ -n "$$pids" ] || return 0
	  asked=1
	  echo "asking $$pids to stop"
	  kill -TERM $$pids 2>/dev/null || true  # some may just have ended
	  kill -CONT $$pids 2>/dev/null || true  # one that SIGSTOP holds hears TERM only then
	  until [ -z "$$($$1)" ]; do
	    (( SECONDS < 60 )) || { echo "still running after 60 s: $$($$1). make stop again ends them at once"; exit 1; }
	    sleep 0.2
	  done
	}
	preparing() { $(PY) monitor.py --work '$(WORK)' --pids preparing | xargs; }
	asked=
	end preparing
	[ ! -e '$(WORK)'/.launch ] || flock -w 60 '$(WORK)'/.launch true || { echo 'shards are still being started'; exit 1; }
	end running
	[ -n "$$asked" ] || { echo 'no shard of $(WORK) is running'; exit 0; }
	echo 'stopped; the same make extract goes on'

clean-shm:  ## remove what this run left in staging; markers stay
	@$(RUNNING)
	[ -z "$$(running)$$(queued)" ] || { echo "shards of $(WORK) are running ($$(running) $$(queued)): make stop first"; exit 2; }
	[ -f '$(WORK)'/plan/plan.json ] || { echo 'no plan in $(WORK), so nothing of it is in $(STAGE)'; exit 0; }
	run=$$($(PY) -c 'import json; print(json.load(open("$(WORK)/plan/plan.json"))["fingerprint"])')
	for f in '$(STAGE)'/$$run/batch_*.safetensors; do
	  n=$${f##*_}; n=$${n%.safetensors}
	  if [ -e "$$f" ] && [ ! -e '$(WORK)'/markers/.done_$$n ]; then
	    echo "not uploaded yet, to be computed again: $$f"
	  fi
	done
	rm -rf '$(STAGE)'/$$run
	echo "staging of $(WORK) is clean"

restart:  ## the clean restart: stop, clean staging, keep markers, go on
	@$(MAKE) --no-print-directory stop
	$(MAKE) --no-print-directory clean-shm
	$(MAKE) --no-print-directory $(if $(wildcard $(WORK)/slurm.json),slurm,extract)

reconcile: $(VENV)  ## make the markers agree with one listing of OUT and print the difference; no GPU
	@CUDA_VISIBLE_DEVICES= $(EXTRACT) --reconcile

verify: $(VENV)  ## recompute SAMPLES samples of OUT alone with plain transformers and compare
	@[[ -n '$(OUT)' && -n '$(MODEL)' ]] || { echo 'verify: OUT= and MODEL= must be those of the run'; exit 2; }
	$(PY) tests/oracle.py --out '$(OUT)' --model '$(MODEL)' --samples '$(SAMPLES)' --dtype '$(DTYPE)' \
	  $(if $(DEVICE),--device '$(DEVICE)')

export: $(VENV)  ## turn OUT, local or in S3, into what trainer FORMAT loads, in TO
	@[ -n '$(OUT)' ] || { echo 'export: OUT= (a run) is missing. make help explains'; exit 2; }
	$(PY) export.py --from '$(OUT)' --to '$(TO)' --format '$(FORMAT)' --algorithm '$(ALGORITHM)'

# ---- the project itself

D := $(if $(filter file default,$(origin WORK)),work/demo,$(WORK))
demo: $(VENV)  ## all of it in minutes, without a GPU: tiny model, 300 chats, a real S3 server, 2 shards, proof
	@echo '--- a tiny random-weight model and 300 conversations'
	$(PY) tests/tiny.py '$(D)'
	echo '--- a real S3 server on 127.0.0.1:$(PORT); its bucket is a directory below $(D)/s3'
	$(PY) tests/s3.py start --dir '$(D)/s3' --port '$(PORT)' --pid-file '$(D)/s3.pid' --bucket hidden-states
	trap "$(PY) tests/s3.py stop --pid-file '$(D)/s3.pid'" EXIT
	environment=$$($(PY) tests/s3.py env --dir '$(D)/s3' --port '$(PORT)'); eval "$$environment"
	echo '--- plan, warm-up, two shards, uploads by aws s3 cp'
	export OMP_NUM_THREADS=1
	if nvidia-smi -L >/dev/null 2>&1; then export CUDA_VISIBLE_DEVICES=0,0; fi  # both shards share the first GPU
	$(MAKE) --no-print-directory extract MODEL='$(D)/model' DATA='$(D)/chat.jsonl' WORK='$(D)' \
	  OUT=s3://hidden-states/run1 STAGE='$(STAGE)' GPUS=2 TOKENS=2048 MAX_LEN=1024 LAYERS=dflash:5 UPLOADS=2 UPLOAD_MBPS=0 \
	  ARGS='--compute-dtype fp32 --dtype fp32'
	$(PY) tests/s3.py stop --pid-file '$(D)/s3.pid'
	trap - EXIT
	echo '--- proof: every sample alone through plain transformers, against the files in the bucket'
	CUDA_VISIBLE_DEVICES= $(PY) tests/oracle.py --out '$(D)/s3/hidden-states/run1' --model '$(D)/model' \
	  --data '$(D)/chat.jsonl' --samples all | tee '$(D)/proof.txt'
	echo '--- what there is now'
	echo '  $(D)/chat.jsonl, $(D)/model               the input'
	echo '  $(D)/s3/hidden-states/run1   the bucket: manifest.json, index.parquet, batches/'
	echo '  $(D)/plan, markers, logs     the work directory; run make demo again: nothing is left to do'
	echo '--- make status WORK=$(D)'
	$(PY) monitor.py --work '$(D)' --stage '$(STAGE)'
	tail -n 1 '$(D)/proof.txt'

train-demo: $(VENV)  ## train a tiny head on what make demo left: the loss falls
	@out='$(D)/s3/hidden-states/run1'
	[ -f "$$out"/manifest.json ] || { echo "no run in $$out: make demo first"; exit 2; }
	$(PY) tests/train_demo.py --out "$$out"

# Three files at a time keep two cores busy, since many tests wait. With ARGS it is one process, as -x and --pdb want it.
test: $(VENV)  ## the project's tests
	@$(PY) -m pytest -q tests $(or $(ARGS),-n 3 --dist loadfile --no-loadscope-reorder) || {
	  code=$$?
	  echo 'one of them alone: make test ARGS="-k NAME -x"'; exit $$code
	}

drill: $(VENV)  ## minutes of SIGKILLs over a run into a real S3 server, then proof that nothing was lost
	@$(PY) tests/drill.py $(ARGS)

simulate: $(VENV)  ## minutes: a run of 914,000 samples without a GPU, its plan, brake, listings and status
	@$(PY) tests/simulate.py $(ARGS)

bench: $(VENV)  ## stages, writing and planning of a tiny model on this CPU
	@$(PY) tests/bench.py $(ARGS)

test-gpu: $(VENV)  ## what only a GPU can show: fast kernels against transformers alone, compilations, short memory
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo 'torch sees no GPU here; make test is for any machine'; exit 2; }
	$(PY) -m pytest -q tests/test_gpu.py $(ARGS)

bench-gpu: $(VENV)  ## the Qwen3.6-27B shape with random weights on one GPU, against the other ways
	@$(PY) tests/bench.py --gpu $(ARGS)
