"""An artifact on disk and on the Hub: data only, nothing in it is ever run or unpickled.

longtrain.json       schema version, method, config, target, sha256 of the tensor files, provenance
model.safetensors    the trained tensors
golden.safetensors   fixed inputs and the outputs they must give
FOLDER/...           the module in formats of other tools, where the method has any; never read here
README.md            model card (read by people, never by longtrain); *.png: its pictures
evidence.json        the training's curves and the results of evaluations, as the card and `inspect` show them
local.json           the target's folder on this machine, where it has one; never uploaded
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain import methods
from longtrain.artifact.evidence import EVIDENCE, Evidence
from longtrain.artifact.found import HUB, find, imported
from longtrain.artifact.golden import Golden
from longtrain.artifact.hub import check_push, upload
from longtrain.artifact.stored import (
    GOLDEN,
    KINDS,
    check_copies,
    compare_names,
    local_target,
    read_golden,
    read_manifest,
    read_tensors,
    refuse_missing_keys,
    refuse_not_finite,
)
from longtrain.artifact.verification import ADVICE, Verification, refuse
from longtrain.artifact.written import CARD, MODEL, card_of, files_of
from longtrain.assets import MANIFEST, artifact_kind
from longtrain.errors import ArtifactError, ConfigError, LongtrainError, first_line
from longtrain.files import sealed, write_files
from longtrain.folders import replaced_folder
from longtrain.log import get_logger
from longtrain.settings import from_file, read
from longtrain.targets.info import TargetInfo, TargetSketch

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.model import Target

log = get_logger(__name__)

NO_GOLDEN = "it has no golden outputs, so nothing shows that it computes what was exported"
READ = (MANIFEST, MODEL, GOLDEN, EVIDENCE)
"""What is fetched of an artifact on the Hub."""
FILES = (*READ, CARD, "*.png")
"""What is uploaded; it names no folder of this machine."""


@dataclass(frozen=True)
class Artifact:
    """A trained module with everything needed to use it on its target, and to refuse any other.

    Args:
        method: a name of the closed table `methods.names()`.
        config: the method's configuration as plain values.
        target: the target it was trained for.
        tensors: the module's state, by name.
        golden: recorded outputs; None only for methods that bring nothing to an engine.
        provenance: the command, versions and data that made it.
        folder: the folder that it was read from.
        verification: what its export found, and what comparisons found since it was loaded.
        lenient: whether a comparison that fails is noted there and not raised.
    """

    method: str
    config: dict[str, Any]
    target: TargetInfo
    tensors: dict[str, Tensor]
    golden: Golden | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    verification: Verification = field(default_factory=Verification, compare=False)
    lenient: bool = field(default=False, compare=False)

    @classmethod
    def from_module(
        cls,
        method: str,
        config: Any,
        *,
        module: nn.Module,
        target: Target,
        provenance: dict[str, Any] | None = None,
    ) -> Artifact:
        """Wrap a trained module and record its golden outputs on the target.

        What keeps them from being recorded is noted in `verification`: the module can be saved all the same.

        Args:
            method: the method's name.
            config: its `Config`.
            module: the trained module.
            target: the target it was trained for.
            provenance: see `Artifact`.

        Raises:
            ArtifactError: a weight is NaN or infinite.
        """
        spec = methods.get(method)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
        refuse_not_finite(tensors, f"the trained {method} module")
        values = dataclasses.asdict(config)
        made = cls(method, values, target.info, tensors, provenance=dict(provenance or {}))
        parts = None if spec.attach is None else made._parts(target)
        roles = () if parts is None else (parts.draft, parts.evictor, parts.selector)
        kinds = [kind for role, kind in zip(roles, KINDS.values(), strict=False) if role is not None]
        if not kinds:
            return made
        others = [partial(made._parts, **keys) for keys in spec.golden_others(config, target.info)]
        tokens = spec.golden_tokens(config)
        try:
            golden = kinds[0].record(made._parts, target, tokens=tokens, others=others)
        except (LongtrainError, RuntimeError) as error:  # of torch too, as when memory runs out
            made.verification.faults.append(f"its golden outputs could not be recorded: {first_line(error)}")
            return made
        return dataclasses.replace(made, golden=golden)

    @classmethod
    def load(
        cls,
        where: str | Path,
        *,
        home: str | Path = ".",
        trained_by: str | None = None,
        unverified: bool = False,
    ) -> Artifact:
        """Read and check an artifact: schema, method, checksums, names and shapes of every tensor.

        Args:
            where: a folder, a name under `home/checkpoints`, the name of one that ships with the package
                (`tiny_longspec`, `tiny_lookaheadkv`), or a Hub id (ORG/NAME, or hub:ORG/NAME, either with
                @REVISION); or another tool's folder that a method reads.
            home: the folder that holds `checkpoints`.
            trained_by: who trained another tool's folder, where that changes what it means.
            unverified: take an artifact without golden outputs too, which nothing then compares with what
                was exported. Folders of other tools have none.

        Raises:
            ArtifactError: nothing is there, or what is there is damaged or of another format.
        """
        folder = find(where, Path(home), patterns=READ)
        if not (folder / MANIFEST).is_file():
            name, found = imported(folder, trained_by)
            refuse_not_finite(found.tensors, str(folder))
            return cls(name, found.config, found.target, found.tensors, None, found.about, folder)
        manifest = read_manifest(folder / MANIFEST)
        method = manifest["method"]
        if method not in methods.names():
            raise ArtifactError(
                f"{folder / MANIFEST} names the method '{method}'; known: {', '.join(methods.names())}; "
                "a newer longtrain may know it"
            )
        try:
            info = TargetInfo.from_json(manifest["target"])
        except (TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{folder / MANIFEST} describes its target wrongly: {error}; export it again"
            ) from None
        info = dataclasses.replace(info, name=local_target(folder) or info.name)
        tensors = read_tensors(folder / MODEL, manifest["files"])
        refuse_not_finite(tensors, str(folder / MODEL))
        golden = read_golden(folder, manifest)
        verification = from_file(Verification, manifest["verification"])
        if golden is None and methods.get(method).attach is not None and not verification.faults:
            verification.faults.append(NO_GOLDEN)
        if verification.faults and not unverified:
            raise ArtifactError(
                f"{folder} is not verified: {verification.faults[0]}; look closer: longtrain inspect "
                f"{folder}; {ADVICE}"
            )
        check_copies(folder, manifest["files"])
        artifact = cls(
            method,
            manifest["config"],
            info,
            tensors,
            golden,
            manifest["provenance"],
            folder,
            verification,
            unverified,
        )
        refuse_missing_keys(artifact.config, methods.config_class(method), folder)
        compare_names(artifact._empty_module(info), tensors, folder / MODEL)
        return artifact

    @property
    def verified(self) -> bool:
        """Whether no comparison has failed, of its export or since."""
        return not self.verification.faults

    def typed_config(self) -> Any:
        """The method's `Config` with this artifact's values.

        Raises:
            ArtifactError: a value that the method does not know.
        """
        try:
            return read(methods.config_class(self.method), methods.without_gone(self.config), "method")
        except ConfigError as error:
            raise ArtifactError(
                f"artifact's configuration is wrong for method {self.method}: {error}; a newer longtrain may "
                "know it"
            ) from None

    def build(self, target: Target, *, verify: bool = True) -> nn.Module:
        """The module on the target's device and in its dtype, after all checks.

        Args:
            target: the frozen target at hand.
            verify: ask the golden questions again (one short prompt through the target).

        Raises:
            TargetMismatchError: another target.
            ArtifactError: the golden outputs are not reproduced, and the artifact is not `lenient`.
        """
        self.target.check(target.info)
        if verify and self.golden is not None:
            self._verify(self.golden, target)
        return self._module(target)

    def attach(self, target: Target, *, verify: bool = True, **keys: Any) -> Parts:
        """The parts for an engine.

        Args:
            target: the frozen target at hand.
            verify: see `build`.
            keys: inference keys of the method.

        Raises:
            TargetMismatchError: another target.
            ArtifactError: see `build`; or the method brings nothing to an engine.
        """
        module = self.build(target, verify=verify)
        return _attach(methods.get(self.method), module, target, self.typed_config(), keys)

    def save(self, folder: str | Path) -> Path:
        """Write the folder, whole or not at all; an older artifact in its place is replaced.

        Args:
            folder: the folder to write; `describe` adds pictures and results to its card.

        Raises:
            LongtrainError: the folder holds something else, or the disk is full or not writable.
        """
        folder = Path(folder)
        files = files_of(self, folder.name)
        with replaced_folder(folder, artifact_kind(folder, files)) as fresh:
            write_files(fresh, files)
        return folder

    def describe(
        self,
        evidence: Evidence | None = None,
        *,
        pictures: dict[str, bytes] | None = None,
        licence: str | None = None,
        address: str | None = None,
    ) -> None:
        """Write the card of the folder anew; what is not given stays as the folder has it.

        Args:
            evidence: how training went and what was measured.
            pictures: PNG files to add, by file name.
            licence: of the module, which the manifest then states too.
            address: where readers find the artifact, `hub:ORG/NAME`; None: in the card's own folder.

        Raises:
            ConfigError: the artifact was not loaded from a folder of ours.
        """
        folder, files = self.folder, dict(pictures or {})
        if folder is None or not (folder / MANIFEST).is_file():
            raise ConfigError("only an artifact on disk can be pushed; save it and load it from there")
        if evidence is not None:
            files[EVIDENCE] = evidence.to_bytes()
        if licence is not None:
            self.provenance["license"] = licence
            manifest = read_manifest(folder / MANIFEST)
            manifest["provenance"]["license"] = licence
            files[MANIFEST] = sealed(manifest)
        name = address.rpartition("/")[2] if address else folder.name
        shown = {*(file.name for file in folder.glob("*.png")), *(pictures or {})}
        known = evidence or Evidence.of_folder(folder)
        files[CARD] = card_of(self, name, self._copies(), shown, known, address=address)
        write_files(folder, files)

    def push(self, repo: str, *, private: bool = True, collection: str | None = None) -> str:
        """Upload the folder this artifact was loaded from; its card then says how to load it from there.

        Args:
            repo: ORG/NAME on the Hub (`HF_ENDPOINT` decides which one).
            private: see `upload`.
            collection: see `upload`.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: not logged in, offline, or `repo` is not ORG/NAME; or another tool's folder.
            ArtifactError: the Hub refused.
        """
        check_push(repo, collection)
        self.describe(address=HUB + repo)
        assert self.folder is not None
        patterns = [*FILES, *self._copies()]
        return upload(self.folder, repo, patterns=patterns, private=private, collection=collection)

    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def checksum(self) -> str:
        """sha256 of the file that the weights were read from (the first one of several)."""
        assert self.folder is not None
        files = [self.folder / MODEL, *sorted(self.folder.glob("model-*")), *self.folder.glob("*.bin")]
        first = next(file for file in files if file.is_file())
        with first.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _verify(self, golden: Golden, target: Target) -> None:
        """Compare with the golden outputs; what fails is raised, or noted where the artifact is lenient."""
        checks, faults = self.verification.checks, self.verification.faults
        try:
            checks[:] = golden.measure(self._parts, target)
            refuse(checks)
        except ArtifactError as error:
            if not self.lenient:
                raise ArtifactError(f"{error}; {ADVICE}") from error
            if str(error) not in faults:
                faults.append(str(error))
                log.warning("unverified=%s reason=%s", self.folder or self.method, error)

    def _copies(self) -> list[str]:
        """Files of the folder in formats of other tools."""
        assert self.folder is not None
        return [name for name in read_manifest(self.folder / MANIFEST)["files"] if "/" in name]

    def _module(self, view: Any) -> nn.Module:
        """The module in the dtype and on the device of a target or a view of one."""
        info = view.info if isinstance(self.target, TargetSketch) else self.target
        module = self._empty_module(info).to_empty(device=view.device)
        module.load_state_dict(self.tensors)
        return module.to(dtype=view.dtype).eval().requires_grad_(False)

    def _parts(self, view: Any, **keys: Any) -> Parts:
        spec = methods.get(self.method)
        return _attach(spec, self._module(view), view, self.typed_config(), {**spec.golden_keys, **keys})

    def _empty_module(self, info: TargetInfo) -> nn.Module:
        config = self.typed_config()
        try:
            with torch.device("meta"):
                return methods.get(self.method).build(config, info)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ArtifactError(
                f"artifact describes no {self.method} module: {reason}; export it again"
            ) from None


def _attach(spec: MethodSpec, module: nn.Module, target: Target, config: Any, keys: dict[str, Any]) -> Parts:
    if spec.attach is None:
        raise ArtifactError(f"method {spec.name} brings nothing to an engine; it cannot be attached")
    return spec.attach(module, target, config, keys)
