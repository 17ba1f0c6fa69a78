# `make run` and `make test` work on a fresh machine: they make a virtual environment and install into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run tables quick verify leaderboard results closed-form asynchronous small-vit vit-study gpu gpu-check gpu-papers stsa-table1 privacy-figure bench bench-compare bench-memory bench-scaling bench-tree bench-ranks bench-secure bench-training bench-sweep bench-small bench-peers bench-heads bench-extraction bench-partitions bench-sites faults attacks test test-all browser flower lint types site package clean

run: $(VENV)/.run
	$(BIN)/fcl-bench

# Writes the papers' tables, and the figures of the runs if there are any.
tables: $(VENV)/.run
	$(BIN)/fcl-tables --paper all --html
	if ls outputs/runs/*/run.json >/dev/null 2>&1; then $(BIN)/fcl-tables --figures --html; fi

# Does the runs behind docs/results/index.md: about an hour on two cores. After an interruption the same command does the rest.
FEATURES ?= ../shared/data/cifar100-mobilenetv2.npz
ONCE := $(BIN)/fcl-bench -m data=features data.path=$(FEATURES) tasks=10
CIFAR := $(ONCE) seed=0,1,2
DIGITS := $(BIN)/fcl-bench -m data=digits tasks=10 seed=0,1,2 beta=0.1
results: $(VENV)/.run
	$(DIGITS) method=stsa_e method.gamma=100
	$(DIGITS) method=afl,centred_sketch,fedran
	$(DIGITS) method=centralised_ridge method.ridge=0.001,100
	$(ONCE) method=afl,afcl,stsa,centred_sketch,fedran,centralised_ridge wire.dtype=float64,float32,float16,bfloat16
	$(ONCE) method.ssl=false,true label_rate=0.1,0.2,0.5

# Does the runs of docs/results/closed_form.md and writes its tables: about two hours on two cores. COMPACT is the shortest wire
# for every method: sums in 16 bits, unit vectors in 8, triangles of symmetric matrices.
COMPACT := wire.dtype=float16 wire.factors=int8 wire.gram=packed
COMPARED := $(CIFAR) $(COMPACT)
FIVE := beta=0.1 clients=5
FOUR := beta=0.1,1 clients=5,20
BOTH := method.scale_scores=false,true
SCALED := method.scale_scores=true
ISOTROPIC := method=centred_sketch
GAUSSIAN := method=gaussian_sketch
RIDGES := method=afl,stsa $(BOTH)
DISCRIMINANTS := method=fedncm,fedlda,fedklda
FEW := $(BIN)/fcl-bench -m data=digits tasks=10 seed=0,1,2 $(COMPACT) $(FIVE)
closed-form: $(VENV)/.run
	$(COMPARED) $(FOUR) $(GAUSSIAN)
	$(COMPARED) $(FIVE) $(GAUSSIAN) method.scale_scores=false
	$(COMPARED) $(FOUR) $(ISOTROPIC) method.rank=32 $(SCALED)
	$(COMPARED) $(FIVE) $(ISOTROPIC) method.rank=8,16,64 $(SCALED)
	$(COMPARED) $(FIVE) $(ISOTROPIC) method.rank=32
	$(CIFAR) $(FIVE) method=stsa method.gamma=0.001,10000,auto $(BOTH)
	for setting in "split.imbalance=1" "split.imbalance=0.1"; do \
		$(COMPARED) $(FIVE) $$setting method=centralised_ridge method.ridge=0.001,auto $(BOTH) && \
		$(COMPARED) $(FIVE) $$setting $(RIDGES) && \
		$(COMPARED) $(FIVE) $$setting method=fedran method.rank=64,512 $(BOTH) && \
		$(COMPARED) $(FIVE) $$setting method=stsa_e method.gamma=1e6 $(BOTH) && \
		$(COMPARED) $(FIVE) $$setting method=ranpac,ds_al method.M=2048 $(BOTH) && \
		$(COMPARED) $(FIVE) $$setting $(DISCRIMINANTS) && \
		$(COMPARED) $(FIVE) $$setting method=fedfecam method.tukey=1 || exit 1; \
	done
	$(COMPARED) $(FIVE) split.imbalance=0.1 $(GAUSSIAN) $(BOTH)
	$(COMPARED) $(FIVE) split.imbalance=0.1 $(ISOTROPIC) method.rank=32 $(BOTH)
	$(COMPARED) $(FIVE) split.imbalance=0.1 method=air $(BOTH)
	$(COMPARED) $(FIVE) split.imbalance=0.1 method=air method.correction=logits
	$(COMPARED) $(FIVE) split.imbalance=0.1 method=fedlda method.prior=counts
	$(COMPARED) $(FIVE) method=fedran method.complement=floor method.rank=64,512 $(BOTH)
	$(COMPARED) beta=0.1 clients=20 method=afl,stsa
	$(COMPARED) beta=0.1 clients=20 method=stsa_e method.gamma=1e6 $(BOTH)
	$(COMPARED) beta=0.1 clients=20 method=fedran method.rank=512 $(BOTH)
	$(COMPARED) beta=0.1 clients=20 method=centralised_ridge method.ridge=0.001
	$(COMPARED) beta=0.1,1 clients=100 $(ISOTROPIC) method.rank=32 $(SCALED)
	$(COMPARED) $(FIVE) $(GAUSSIAN) method.M=8192
	$(COMPARED) $(FIVE) method.M=4096 method=centralised_ridge method.ridge=0.001
	$(COMPARED) $(FIVE) method.M=4096 method=centralised_ridge method.ridge=auto $(SCALED)
	$(FEW) $(GAUSSIAN) $(BOTH)
	$(FEW) $(ISOTROPIC) $(BOTH)
	$(FEW) method=centralised_ridge method.ridge=0.001,auto $(BOTH)
	$(FEW) method=stsa method.gamma=auto $(BOTH)
	$(FEW) method=fedran method.rank=64 $(BOTH)
	$(FEW) method=afl $(BOTH)
	$(FEW) $(DISCRIMINANTS),fedfecam
	$(BIN)/fcl-tables --where data=features --where wire.factors=int8 --where split.imbalance=1 --name closed-form
	$(BIN)/fcl-tables --where data=features --where wire.factors=int8 --where split.imbalance=1 --where beta=0.1 \
		--where clients=5 --where method.scale_scores=true --where method.rank=8,16,32,64,512 --where method.ridge=0,0.001,auto \
		--where method.M=null,2048 --name closed-form-figure
	$(BIN)/fcl-tables --where data=features --where wire.factors=int8 --where split.imbalance=0.1 --name long-tail
	$(BIN)/fcl-tables --where data=digits --where wire.factors=int8 --name closed-form-digits

# Does the runs of docs/results/asynchronous.md: half an hour of one core. On the digits, a minute:
# make asynchronous STEPS="data=digits tasks=10 split.groups=5 clients=20 partition.min_size=0" WIDTH=256
STEPS ?= data=features data.path=$(FEATURES) tasks=10 clients=20
WIDTH ?= 1024
OUT_OF_STEP := $(BIN)/fcl-bench -m $(STEPS) beta=0.5 split=asynchronous split.order=same,shifted,independent out=outputs/asynchronous
asynchronous: $(VENV)/.run
	$(OUT_OF_STEP) method=afl,fedncm
	$(OUT_OF_STEP) method=stsa,centred_sketch,centralised_ridge,fedlda method.M=$(WIDTH)
	$(OUT_OF_STEP) method=gaussian_sketch method.M=$(WIDTH)
	$(OUT_OF_STEP) method=fedran method.M=$(WIDTH) method.rank=64
	$(OUT_OF_STEP) method=fedavg,fedprox,scaffold,feddyn method.trains=features method.training.rounds=5 method.training.epochs=2
	$(BIN)/fcl-tables --out outputs/asynchronous --figures accuracy_over_tasks --name asynchronous \
		--where method=stsa,fedncm,fedran,gaussian_sketch,fedavg,scaffold,feddyn

CIFAR100 ?= ../shared/data/cifar100

# Does the runs behind the figure of docs/explanation/noise.md, accuracy against epsilon, and draws it: a quarter of an hour on two
# cores.
PRIVATE := $(BIN)/fcl-bench -m data=features data.path=$(FEATURES) tasks=5 clients=100 beta=0.5 out=outputs/privacy \
	noise=gaussian noise.epsilon=1,2,4,8,16
privacy-figure: $(VENV)/.dev
	$(PRIVATE) method=fedncm,fedlda
	$(PRIVATE) method=afl method.upload=sums
	$(BIN)/fcl-tables --out outputs/privacy --figures --metrics A_avg,A_T,epsilon --name privacy

# Trains the small vision transformer (conf/backbone/vit_32.yaml) on CIFAR-100's first 75 classes: about an hour on two
# cores. Streams on it must be of the other classes: data.skip_classes=75.
VIT_FOLDER ?= outputs/small-vit
VIT ?= $(VIT_FOLDER)/model.safetensors
small-vit: $(VIT)
	@echo "Use it on the other classes: fcl-bench data=cifar100 data.path=$(CIFAR100) data.skip_classes=75" \
		"backbone=vit_32 backbone.pretrained=true backbone.checkpoint=$(VIT)"

$(VIT): | $(VENV)/.run
	$(BIN)/fcl-bench method=centralised data=cifar100 data.path=$(CIFAR100) data.classes=75 tasks=1 clients=1 beta=100 \
		backbone=vit_32 method.training.rounds=12 method.training.epochs=2 method.training.batch_size=128 \
		method.training.optimizer=adamw method.training.lr=0.001 method.training.weight_decay=0.05 \
		method.training.schedule=cosine out=$(VIT_FOLDER)
	cp "$$(ls -t $(VIT_FOLDER)/runs/centralised-*/model.safetensors | head -1)" $@

# Compares prompts, low-rank updates and closed forms on that transformer, and writes the tables: it is
# frozen, and the stream has the 25 classes that it has not seen. After an interruption the same command does the rest.
VIT_OUT ?= outputs/vit-study
VIT_SEEDS ?= 0,1,2
VIT_BETAS ?= 0.1,1
VIT_RUNS := $(BIN)/fcl-bench -m data=cifar100 data.path=$(CIFAR100) data.skip_classes=75 data.per_class=100 tasks=5 clients=5 \
	beta=$(VIT_BETAS) seed=$(VIT_SEEDS) backbone=vit_32 backbone.pretrained=true backbone.checkpoint=$(VIT) out=$(VIT_OUT)
VIT_CLOSED := afl fedncm \
	"stsa method.M=1024 method.gamma=auto" \
	"stsa_e method.M=1024 method.gamma=auto" \
	"fedran method.M=1024 method.rank=256 method.ridge=auto" \
	"gaussian_sketch method.M=1024"
VIT_TRAINED := method.training.rounds=5 method.training.epochs=1 method.training.batch_size=16 method.training.augment=none
VIT_HEADS := method.trains=features method.loss_classes=seen method.training.lr=0.03 method.training.momentum=0 \
	method.training.weight_decay=0
VIT_TRAINING := "fedavg $(VIT_HEADS)" "fedavg $(VIT_HEADS) method.loss_classes=task method.frozen_heads=true" \
	"regmean $(VIT_HEADS) method.damping=1" \
	"dualprompt,coda_prompt,cprompt,l2p method.training.lr=0.003 method.training.schedule=constant" \
	"pilora method.training.lr=0.001 method.training.rates.heads=0.05" "lorm method.training.lr=0.001 +method.training.rates.heads=0.03"
vit-study: $(VIT) $(VENV)/.run
	for method in $(VIT_CLOSED); do $(VIT_RUNS) method=$$method || exit 1; done
	for method in $(VIT_TRAINING); do $(VIT_RUNS) method=$$method $(VIT_TRAINED) || exit 1; done
	$(BIN)/fcl-tables --out $(VIT_OUT) --figures --name vit-study

# Does every experiment in miniature and writes a table of these runs: 1,089 cells, an estimated hour and
# more of one core (docs/reference/experiments.md). After an interruption the same command does the rest.
QUICK := $(patsubst conf/experiment/%.yaml,outputs/quick/done/%,$(wildcard conf/experiment/*.yaml))
quick: $(QUICK)
	$(BIN)/fcl-tables --out outputs/quick --html

outputs/quick/done/%: conf/experiment/%.yaml $(VENV)/.run
	$(BIN)/fcl-bench -m experiment=$* profile=quick
	mkdir -p $(@D)
	touch $@

# Runs every method of a track, or what is left of it, and writes its table and page into outputs/leaderboard: hours, which it
# says beforehand; after an interruption the same command does the rest.
TRACK ?= features
LEADERBOARD ?=
DATA_OF = $(if $(filter features%,$(TRACK)),data.path=$(FEATURES),data.path=$(CIFAR100))
WEIGHTS_OF = $(if $(filter transformer,$(TRACK)),backbone.checkpoint=$(VIT))
leaderboard: $(VENV)/.dev
	$(BIN)/fcl-bench leaderboard run $(TRACK) $(DATA_OF) $(WEIGHTS_OF) $(LEADERBOARD)

# Draws N numbers of README, docs and results, runs their commands and compares to the last digit (results/README.md). Numbers
# on data of your own want FEATURES= and CIFAR100=; VERIFY="--minutes 60 --each 600" allows dearer runs.
N ?= 25
SEED ?= 0
VERIFY ?=
verify: $(VENV)/.run
	$(BIN)/python -m benchmarks verify -n $(N) --seed $(SEED) \
		$(if $(wildcard $(FEATURES)),--features $(FEATURES)) $(if $(wildcard $(CIFAR100)),--cifar100 $(CIFAR100)) $(VERIFY)

# What needs a GPU (docs/how-to/gpu.md): tests and benchmarks, then papers' numbers. Each stops after MINUTES; gpu-papers goes
# on where it stopped when it is called again. make -k gpu does the second even if the first fails.
MINUTES ?= 25
GPU ?= --device cuda --minutes $(MINUTES)
gpu: gpu-check gpu-papers

gpu-check: $(VENV)/.dev
	$(BIN)/python -m benchmarks gpu check $(GPU)

gpu-papers: $(VENV)/.dev
	$(BIN)/python -m benchmarks gpu papers $(GPU) $(if $(wildcard $(CIFAR100)),--data $(CIFAR100))

# STSA's Table 1 from scratch at beta 0.5 with what its public code does: its rate, its draws too, and these at our rate. About 11
# core-hours each where the CPU multiplies bfloat16; after an interruption the same command goes on.
STSA_TABLE_1 := $(BIN)/fcl-bench experiment=stsa_scratch_cifar100 beta=0.5 seed=0 \
	"experiment/preset=[scratch_cifar100,first_stage_published,stsa_resnet]" adapt.training.precision=bfloat16 \
	checkpoint_rounds=2 $(if $(wildcard $(CIFAR100)),data.path=$(CIFAR100))
STSA_DRAWS := split.order=published partition=published
stsa-table1: $(VENV)/.run
	$(STSA_TABLE_1) adapt.training.lr=0.2
	$(STSA_TABLE_1) adapt.training.lr=0.2 $(STSA_DRAWS)
	$(STSA_TABLE_1) adapt.training.lr=0.04 $(STSA_DRAWS)

# Times every stage and method beside the bare matrix products and beside plain code: about 20 minutes on two cores;
# SIZE=quick takes two minutes.
SUITE := $(BIN)/python -m pytest benchmarks/suite
SIZE ?= full
NAME ?= $(SIZE)
bench: $(VENV)/.dev
	$(SUITE) --size $(SIZE) --features $(FEATURES) --benchmark-json=outputs/bench/$(NAME).json $(BENCH)

# Fails if a stage is slower in NEW than in OLD, each as a multiple of the bare work in the same file:
# make bench-compare OLD=a.json NEW=b.json
TOLERANCE ?= 0.5
bench-compare: $(VENV)/.dev
	$(BIN)/python -m benchmarks compare $(OLD) $(NEW) --tolerance $(TOLERANCE)

# Measures the peak memory of the largest runs: five minutes on two cores.
bench-memory: $(VENV)/.dev
	$(SUITE)/bench_memory.py --long --features $(FEATURES) --benchmark-json=outputs/bench/memory.json $(BENCH)

# Measures how seconds, memory and bytes grow with clients, tasks, classes, M and samples: ten minutes; BENCH=--quick
# takes one or two.
bench-scaling: $(VENV)/.run
	$(BIN)/python -m benchmarks scaling --markdown outputs/bench/scaling.md $(BENCH)

# Measures a tree of aggregators (transport=tree) beside a flat server, and on paper for up to a million clients:
# docs/results/scaling.md; minutes; BENCH=--quick takes one on a free core, BENCH=--paper seconds.
bench-tree: $(VENV)/.run
	$(BIN)/python -m benchmarks tree --markdown outputs/bench/tree.md $(BENCH)

# Measures runs over two ranks (transport=ranks) beside the same runs in one process: docs/how-to/ranks.md; five minutes on
# two cores that do nothing else.
bench-ranks: $(VENV)/.run
	$(BIN)/python -m benchmarks ranks $(BENCH)

# Measures what secure=sums costs a client and the server, in processor seconds: docs/explanation/secure_sums.md; minutes on one
# core; BENCH=--quick takes seconds.
bench-secure: $(VENV)/.dev
	$(BIN)/python -m benchmarks secure_sums $(BENCH)

bench-extraction: $(VENV)/.run
	$(BIN)/python -m benchmarks extraction_throughput $(BENCH)

# Prints statistics of every split and partition on CIFAR-100, and the seconds that each takes.
bench-partitions: $(VENV)/.run
	$(BIN)/python -m benchmarks partitions $(BENCH)

# Processor seconds of each further job of a sweep: five minutes.
bench-sweep: $(VENV)/.run
	$(BIN)/python -m benchmarks sweep_cost $(BENCH)

# Times FedAvg with many small clients beside a plain loop and the bare steps.
bench-small: $(VENV)/.run
	$(BIN)/python -m benchmarks small_clients $(BENCH)

# Times public code beside ours, from a folder of your checkouts (docs/results/peers.md): make bench-peers PEERS=FOLDER
bench-peers: $(VENV)/.run
	$(BIN)/python -m benchmarks peers --peers $(PEERS) $(BENCH)

bench-training: $(VENV)/.run
	$(BIN)/python -m benchmarks training_throughput $(BENCH)

# Times FedAvg on cached features beside a plain autograd loop.
bench-heads: $(VENV)/.run
	$(BIN)/python -m benchmarks head_training $(BENCH)

# Tries what must not lose or falsify anything (docs/explanation/campaign.md): writes that fail, kills, commands side by side, wrong
# configurations, damaged files, hostile uploads. About 20 minutes on two cores; FAULTS=--quick takes two, and
# FAULTS="writes --seed 1" is one part with other draws.
FAULTS ?=
faults: $(VENV)/.dev
	$(BIN)/python -m benchmarks.faults $(FAULTS)

# Pushes a million malformed inputs through every decoder (docs/explanation/campaign.md): about half an hour of one core.
# FUZZ="replies frames --inputs 10000" is a part.
FUZZ ?=
fuzz: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fuzz $(FUZZ)

# Lets a share of the clients lie as well as they can, method by method (docs/explanation/hostile_uploads.md): about 15 minutes on
# one core. ATTACKS="--methods afl,stsa" is a part; the file keeps what is done.
ATTACKS ?=
attacks: $(VENV)/.dev
	$(BIN)/python -m benchmarks attacks --out outputs/attacks.csv $(ATTACKS)

# Compiled modules are kept whatever the environment says: both workers, and the processes that tests start, read them.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadfile
test: $(VENV)/.dev
	$(PYTEST)

# All tests but those that need a GPU: about 40 minutes on two cores. Tests over half a processor second are marked slow.
test-all: $(VENV)/.dev
	$(PYTEST) -m "not gpu"

# Runs the tests of pages in a real browser (apt-get install chromium, or FCL_BENCH_CHROMIUM names one): half a minute.
browser: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[browser]'
	$(BIN)/python -m pytest -m 'slow or not slow' tests/leaderboard tests/results/test_page_in_browser.py

# Runs the tests of transport=flower with Flower itself, in an environment of its own that takes what it can from $(VENV),
# PyTorch above all: half a minute to install, and four minutes. FLOWER=tests/flower/test_job.py is the one federation with
# a SuperLink and two nodes: a minute; FLOWER=tests/flower/test_app_job.py is examples/flower, and its simulation if Ray is there.
FLOWER ?= tests/flower
FLOWER_VENV ?= $(VENV)-flower
flower: $(FLOWER_VENV)/.run
	PATH="$(abspath $(FLOWER_VENV))/bin:$$PATH" $(FLOWER_VENV)/bin/python -m pytest -m 'slow or not slow' $(FLOWER)

# Kills the processes of a federation of three sites, and cuts connections, at random moments (docs/explanation/campaign.md): an
# hour on two cores that are busy otherwise, too.
bench-sites: $(FLOWER_VENV)/.run
	PATH="$(abspath $(FLOWER_VENV))/bin:$$PATH" $(FLOWER_VENV)/bin/python -m benchmarks site_kills $(BENCH)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/house
	$(BIN)/python -m benchmarks.audit

types: $(VENV)/.dev
	$(BIN)/mypy

# Builds the documentation into build/site, warnings as errors; the tutorial notebook is executed: a minute.
site: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --fresh-env docs build/site

# Builds the wheel and the sdist into dist/ and checks both as a package index would.
package: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(FLOWER_VENV) dist build

$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

# Flower asks for other versions of packages that $(VENV) has: those it gets here, where they come first, and $(VENV)
# stays as it is. (pip may say that a tool of $(VENV), such as twine, wants the version there; it is not used here.)
SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(FLOWER_VENV)/.run: pyproject.toml | $(VENV)/.dev
	$(BIN)/python -m venv --clear $(FLOWER_VENV)
	$(BIN)/python $(SITE_PACKAGES) > "$$($(FLOWER_VENV)/bin/python $(SITE_PACKAGES))/beside.pth"
	$(FLOWER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[flower]'
	touch $@
