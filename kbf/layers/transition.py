"""The transition of a state's embedding as a layer of a network: weights -> predicted weights."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kbf.filters.kernel.controlled_transition import controlled_transition
from kbf.filters.kernel.operators import transition_operator
from kbf.layers.kernel_layer import KernelLayer, check_alike
from kbf.recording import Transitions, transitions
from kbf.rkhs.kernels import KERNELS
from kbf.runtime.errors import FitError


class KernelTransition(KernelLayer):
    """Conditional mean embedding of the next state: weights ``b n`` -> P w ``b n``.

    For m pairs (source, target) of successive states z, with G the Gram matrix of all n states,

        P w = 0 except  (P w)_target = (G_ss + m reg I)^-1 G_s: w.

    With a control u the kernel is the product k_Z k_U, and G_s: w is multiplied by k_U(u_i, u)
    (`kbf.filters.kernel.controlled_transition`). Differentiable in weights, states, controls,
    bandwidths and ridge.

    References: Xu et al. (2022), Algorithm 2, step 4; Song et al. (2009).
    """

    log_control_bandwidth: Tensor | None

    def __init__(
        self,
        kernel: str | Callable[..., Tensor] = "gaussian",
        *,
        bandwidth: float | Tensor = 1.0,
        reg: float | Tensor = 1e-3,
        control_bandwidth: float | Tensor | None = None,
        learn_bandwidth: bool = False,
        learn_reg: bool = False,
    ) -> None:
        """Choose the kernel of the states, and of the controls if there are any.

        Args:
            kernel: as in `kbf.layers.kernel_layer.KernelLayer`; a name if there are controls.
            bandwidth: of the kernel, in the units of the states.
            reg: lambda'.
            control_bandwidth: of the kernel of the controls, in their units: a number, or one for
                each control ``k``. Required for controls.
            learn_bandwidth: make the bandwidths parameters.
            learn_reg: make the ridge a parameter.

        Raises:
            ValueError: a control bandwidth that is not positive, or as
                `kbf.layers.kernel_layer.KernelLayer`.
        """
        super().__init__(kernel, bandwidth, reg, learn_bandwidth, learn_reg)
        width = (
            None
            if control_bandwidth is None
            else torch.as_tensor(control_bandwidth, dtype=torch.float64).detach()
        )
        if width is not None and (width.ndim > 1 or not bool((width > 0).all())):
            raise ValueError(
                "KernelTransition: control_bandwidth must be a positive number, or one for each "
                f"control; got {control_bandwidth}"
            )
        log = None if width is None else width.log()
        self.keep("log_control_bandwidth", log, learn_bandwidth)

    def forward(
        self,
        weights: Float[Tensor, "b n"],
        states: Float[Tensor, "n d"],
        pairs: tuple[Tensor, Tensor] | None = None,
        *,
        controls: Float[Tensor, "m k"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n"]:
        """Return the weights ``b n`` of the prediction.

        Args:
            weights: w ``b n``, over the states.
            states: z ``n d``, of the training part.
            pairs: positions ``m`` of the states before and after each recorded move
                (`kbf.recording.transitions`); None if each state is followed by the next row.
            controls: u_i ``m k``, of each recorded move.
            control: u ``b k``, of the move to be predicted.

        Raises:
            ValueError: shapes, types or devices that do not match; positions that are not those of
                states; controls without control, or the reverse.
            NotPositiveDefiniteError: a ridge too small for the precision of the states, or NaN.
        """
        if weights.ndim != 2 or weights.shape[1] != len(states):
            raise ValueError(
                "KernelTransition: weights must be (b, n), one for each of the "
                f"{len(states)} states; got {tuple(weights.shape)}"
            )
        check_alike("KernelTransition", weights=weights, states=states)
        if (controls is None) != (control is None):
            raise ValueError(
                "KernelTransition: give both controls, of the recorded moves, and control, of the "
                "move to be predicted, or none"
            )
        operator = self.operator(states, pairs, controls)
        if controls is None or control is None:
            return operator(weights)
        if control.shape != (len(weights), controls.shape[1]):
            raise ValueError(
                f"KernelTransition: control must be {(len(weights), controls.shape[1])}, "
                f"got {tuple(control.shape)}"
            )
        return operator(weights, control)

    def operator(
        self,
        states: Float[Tensor, "n d"],
        pairs: tuple[Tensor, Tensor] | None = None,
        controls: Float[Tensor, "m k"] | None = None,
    ) -> nn.Module:
        """Return P as a module, weights ``b n`` -> ``b n``, or with controls (weights, control).

        It is for many steps over one memory. Arguments and errors as in `forward`.
        """
        if states.ndim != 2:
            raise ValueError(f"KernelTransition: states must be (n, d), got {tuple(states.shape)}")
        moves = checked_pairs(pairs, len(states), states.device)
        if controls is None:
            return transition_operator(self.gram(states, states), moves, self.reg.to(states))
        width, name = self.control_bandwidth(controls, len(moves.source)), self.kernel_name()
        self.gram(states[:1], states[:1])  # raises for a bandwidth of another length
        return controlled_transition(
            states,
            moves,
            controls.to(states),
            name,
            (self.bandwidth.to(states), width.to(states)),
            self.reg.to(states),
            None,
            0.0,
        )

    def control_bandwidth(self, controls: Float[Tensor, "m k"], moves: int) -> Float[Tensor, " k"]:
        """Return the bandwidth of each control ``k``.

        Raises:
            ValueError: controls that are not one row for each move, or no bandwidth of theirs.
        """
        if controls.ndim != 2 or len(controls) != moves:
            raise ValueError(
                f"KernelTransition: controls must be ({moves}, k), one row for each of the "
                f"{moves} moves; got {tuple(controls.shape)}"
            )
        if self.log_control_bandwidth is None:
            raise ValueError(
                "KernelTransition: the recordings have controls; give "
                "KernelTransition(control_bandwidth=...), a length in the units of the controls"
            )
        width = self.log_control_bandwidth.exp()
        if width.ndim == 1 and len(width) != controls.shape[1]:
            raise ValueError(
                f"KernelTransition: control_bandwidth has {len(width)} lengths, there are "
                f"{controls.shape[1]} controls"
            )
        return width.expand(controls.shape[1])

    def kernel_name(self) -> str:
        """Return the name of the kernel in `kbf.rkhs.kernels.KERNELS`.

        Raises:
            ValueError: a kernel without a name.
        """
        for name, kernel in KERNELS.items():
            if kernel is self.kernel:
                return name
        raise ValueError(
            f"KernelTransition: controls require a kernel by name, one of {', '.join(KERNELS)}"
        )


def checked_pairs(pairs: tuple[Tensor, Tensor] | None, n: int, device: torch.device) -> Transitions:
    """Return the pairs of successive states.

    Raises:
        FitError: there are none.
        ValueError: positions that are not two vectors of one length with whole numbers from 0 to n
            - 1, or targets that repeat.
    """
    if pairs is None:
        pairs = transitions([n], device)
    if len(pairs) != 2 or any(p.ndim != 1 or p.dtype != torch.long for p in pairs):
        raise ValueError(
            "KernelTransition: pairs must be (source, target), two vectors with the positions of "
            "the states before and after each move; kbf.recording.transitions([length, ...]) "
            "makes them"
        )
    source, target = (p.to(device) for p in pairs)
    if len(source) == 0 and len(target) == 0:
        raise FitError("KernelTransition: there is no pair of successive states to learn from")
    if len(source) != len(target) or any(int(p.min()) < 0 or int(p.max()) >= n for p in pairs):
        raise ValueError(
            f"KernelTransition: pairs must be two vectors of one length with positions from 0 to "
            f"{n - 1}, of the {n} states"
        )
    if len(target.unique()) < len(target):
        raise ValueError("KernelTransition: a state follows at most one other; targets repeat")
    return Transitions(source, target)
