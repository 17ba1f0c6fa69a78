# `make run` and `make test` work on a fresh machine: they make a virtual environment and install into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run tables results test lint types clean

run: $(VENV)/.run
	$(BIN)/fcl-bench

tables: $(VENV)/.run
	$(BIN)/fcl-tables

# Every table and figure of docs/results.md; about four hours on two cores, and it goes on where it was interrupted.
FEATURES ?= ../shared/data/cifar100-mobilenetv2.npz
ONCE := $(BIN)/fcl-bench -m data=features data.path=$(FEATURES) tasks=10
CIFAR := $(ONCE) seed=0,1,2
DIGITS := $(BIN)/fcl-bench -m data=digits tasks=10 seed=0,1,2 beta=0.1,0.5,1
results: $(VENV)/.run
	$(CIFAR) beta=0.1,0.5,1 method=stsa,afl,afcl,joint
	$(CIFAR) beta=0.1,0.5,1 method=fedran method.complement=drop,floor
	$(CIFAR) beta=0.1,0.5,1 method=stsa_e method.gamma=1e6
	$(CIFAR) beta=0.1,0.5,1 method=centred_sketch method.rank=16,64
	$(CIFAR) beta=0.1,1 clients=5,20 method=stsa,afl,joint
	$(CIFAR) beta=0.1,1 clients=5,20 method=centred_sketch method.rank=0,4,8,16,32,64,128
	$(CIFAR) beta=0.1,1 clients=5,20 method=fedran method.complement=drop,floor method.rank=32,128,512
	$(CIFAR) beta=0.1,1 clients=5,20 method=fedran method.complement=drop,floor method.rank=1024 method.merge=joint
	$(CIFAR) beta=0.1,1 clients=5,20 method=stsa_e method.gamma=1e5,1e6,1e7
	$(CIFAR) beta=0.1,1 clients=5,20 method=stsa_e method.gamma=1e6 method.dummy_clients=5,50
	$(CIFAR) beta=0.1,1 clients=5,20 method=stsa_e method.gamma=1e6 method.estimator=unbiased
	$(DIGITS) method=stsa,stsa_e method.gamma=100
	$(DIGITS) method=fedran method.complement=drop,floor
	$(DIGITS) method=afl,afcl,centred_sketch
	$(DIGITS) method=joint method.ridge=0.001,100
	$(ONCE) method=afl,afcl,stsa,centred_sketch,fedran,joint wire.dtype=float64,float32,float16,bfloat16
	$(ONCE) method=stsa_e method.gamma=1e6 wire.dtype=float64,float32,float16,bfloat16
	$(ONCE) method.ssl=false,true label_rate=0.1,0.2,0.5
	$(ONCE) method=afl,afcl clients=10,100,1000 partition.min_size=0 wire.dtype=float64
	$(BIN)/fcl-tables --where data=features --where wire.dtype=float32 --where label_rate=1 --name cifar100
	$(BIN)/fcl-tables --where data=digits --name digits

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) dist build

$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@
