"""The commands of ``kbf``, each with its purpose and examples for its help."""

# Purpose, and examples: the words of a command line and what they do.
COMMANDS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "train": (
        "fit one model on one data set and score it",
        [
            ("kbf train", "the Kernel Bayes Filter on the rotation data"),
            (
                "kbf train model=lstm data=oscillatory n_train=900 seed=3",
                "another model, another data set",
            ),
            (
                "kbf train model=lstm model.training.lr=0.01 run_dir=runs/mine",
                "other hyper-parameters, another folder",
            ),
            (
                "kbf train data=dsprites encoder@data.encoding.encoder=resnet18",
                "images, with another encoder",
            ),
            (
                "kbf train data=own data.path=rec.csv data.states=[x,y] data.observations=[a,b]",
                "recordings of your own",
            ),
            (
                "kbf train ckpt_path=runs/mine/checkpoints/last.ckpt",
                "continue an interrupted run",
            ),
            ("kbf train model=auto", "compare models on held-out steps and keep the best"),
            (
                "kbf train --multirun model=kbf,lstm seed=0,1,2",
                "a sweep; add launcher=joblib to run it in parallel",
            ),
        ],
    ),
    "evaluate": (
        "score a checkpoint on its own or on other data",
        [
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt",
                "on the test part of its own data set",
            ),
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt seed=7 data.n_test=1000",
                "on other draws of the data set",
            ),
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt data=oscillatory",
                "on another data set",
            ),
            (
                "kbf evaluate checkpoint=runs/mine/checkpoints/best.ckpt animation=true",
                "with an animation, filter.gif",
            ),
            ("kbf evaluate checkpoint=example:rotation", "a trained filter that comes with kbf"),
            (
                "kbf evaluate checkpoint=best.ckpt smooth=true horizon=5",
                "with smoothing, and forecasts of 1 to 5 steps",
            ),
        ],
    ),
    "filter": (
        "estimate the states of new observations, from files or a stream",
        [
            (
                "kbf filter checkpoint=best.ckpt input=rec.csv output=estimates.csv",
                "a recording, with one observation in each line",
            ),
            (
                "sensor | kbf filter checkpoint=best.ckpt input=- state=now.pt",
                "a stream; a restart continues from now.pt",
            ),
            (
                "kbf filter checkpoint=best.ckpt input=views output=out.npz covariance=full",
                "a folder of images",
            ),
        ],
    ),
    "report": (
        "report what was found about a filter and its recordings, as one HTML file",
        [
            (
                "kbf report checkpoint=best.ckpt",
                "report.html: sensors, regimes, noises, and what would help most",
            ),
            (
                "kbf report checkpoint=example:rotation out=rotation.html trials=false",
                "what the recordings show, without further fits",
            ),
            (
                "kbf report checkpoint=best.ckpt out=learned.html trial_model=ukf_learned",
                "further fits with another filter, which takes longer",
            ),
        ],
    ),
    "export": (
        "export one step of a filter as a program for other machines",
        [
            (
                "kbf export checkpoint=best.ckpt format=onnx out=step.onnx",
                "for ONNX Runtime and kbf.load_onnx",
            ),
            (
                "kbf export checkpoint=best.ckpt format=torch_export out=step.pt2",
                "for torch.export.load and AOTInductor",
            ),
            (
                "kbf export checkpoint=best.ckpt format=torchscript out=step.pt",
                "for torch.jit.load, and LibTorch in C++",
            ),
        ],
    ),
    "serve": (
        "serve a trained filter over HTTP, with a page to watch it",
        [
            (
                "kbf serve checkpoint=best.ckpt",
                "sessions with JSON, metrics and pages, at http://localhost:8000",
            ),
            (
                "kbf serve checkpoint=best.ckpt host=0.0.0.0 hosts=[filter.example.org]",
                "for other machines, behind a proxy",
            ),
        ],
    ),
    "append": (
        "add recordings to a trained filter's memory, without training again",
        [
            (
                "kbf append checkpoint=best.ckpt data.path=new.csv out=better.ckpt",
                "more recordings with the same columns",
            ),
            (
                "kbf append checkpoint=best.ckpt data.path=new.csv out=better.ckpt budget=5000",
                "with at most 5,000 points",
            ),
        ],
    ),
    "compare": (
        "compare many models on the same recordings: table, test, figure",
        [
            (
                "kbf compare data=rotation n_train=100,300 runs=5",
                "all models; continues after an interruption",
            ),
            (
                "kbf compare models=kbf,lstm,ekf n_train=300 runs=30 workers=4",
                "some models, in four processes",
            ),
            ("kbf compare experiment=quick", "a short comparison"),
        ],
    ),
    "reproduce": (
        "reproduce an experiment of a paper: figures, tests and a verdict",
        [
            ("kbf reproduce posterior_mean", "as in the paper; continues after an interruption"),
            (
                "kbf reproduce all preset=quick workers=2",
                "every experiment, in a quarter of an hour",
            ),
            ("kbf reproduce --list", "their names"),
        ],
    ),
    "bench": (
        "run a benchmark: both sides in one process, with ratios",
        [
            ("kbf bench step", "one step of a filter against the dense and the published one"),
            ("kbf bench all threads=2", "every benchmark, with two threads"),
            ("kbf bench --list", "their names"),
        ],
    ),
    "runs": (
        "show the runs of a sweep or below any folder, and the best of them",
        [
            ("kbf runs", "all runs of kbf train below runs/"),
            ("kbf runs runs/multirun/mine --watch", "a sweep, again and again while it runs"),
            (
                "kbf runs runs/multirun/mine metric=test.nmse csv=table.csv",
                "the best by another metric; all metrics as CSV",
            ),
        ],
    ),
    "runs show": (
        "print the provenance of a run, and the command that repeats it",
        [
            (
                "kbf runs show runs/mine",
                "command, commit, versions, machine, and data files with their sums",
            ),
            ("kbf runs show runs/mine/checkpoints/best.ckpt", "of a checkpoint"),
        ],
    ),
    "data": (
        "write a data set as arrays, with a picture",
        [("kbf data data=oscillatory n_train=500 seed=1", "data.npz and data.png")],
    ),
    "data render": (
        "write the views of a full rotation, as frames for data=dmlab",
        [
            (
                "kbf data render dmlab level=nav_maze_static_01 out=lab.npz",
                "DeepMind Lab itself; continues after an interruption",
            ),
            (
                "kbf data render maze seed=3 turns=2 out=maze.npz",
                "this package's ray caster, without other packages",
            ),
            ("kbf train data=dmlab data.frames=lab.npz", "train on these frames"),
            (
                "kbf data render pendulum steps=1000 out=pendulum.npz",
                "Gymnasium's pendulum: recordings for data=own",
            ),
        ],
    ),
    "data check": (
        "read recordings of your own and report their contents and faults",
        [
            (
                "kbf data check rec.csv data.states=[x,y] data.observations=[a,b]",
                "report.md, series.png, states.png, and warnings",
            ),
            (
                "kbf data check runs.npz data.split=recording data.test=0.3",
                "arrays of several recordings",
            ),
            (
                "kbf train data=own data.path=rec.csv data.states=[x,y] data.observations=[a,b]",
                "train on it, with the same settings",
            ),
        ],
    ),
    "floor": (
        "compute the floor: the least error that any filter can reach",
        [
            (
                "kbf floor data=rotation n_train=300 runs=30",
                "with its standard error over 30 draws of the data",
            ),
            ("kbf floor data=rotation smooth=true", "the floor of smoothers"),
        ],
    ),
}
