from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Piece(_message.Message):
    __slots__ = ("piece", "score", "type")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NORMAL: _ClassVar[Piece.Type]
        UNKNOWN: _ClassVar[Piece.Type]
        CONTROL: _ClassVar[Piece.Type]
        USER_DEFINED: _ClassVar[Piece.Type]
        UNUSED: _ClassVar[Piece.Type]
        BYTE: _ClassVar[Piece.Type]
    NORMAL: Piece.Type
    UNKNOWN: Piece.Type
    CONTROL: Piece.Type
    USER_DEFINED: Piece.Type
    UNUSED: Piece.Type
    BYTE: Piece.Type
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    piece: str
    score: float
    type: Piece.Type
    def __init__(self, piece: _Optional[str] = ..., score: _Optional[float] = ..., type: _Optional[_Union[Piece.Type, str]] = ...) -> None: ...

class TrainerSpec(_message.Message):
    __slots__ = ("model_type", "treat_whitespace_as_suffix", "bos_id", "eos_id", "pad_id")
    class ModelType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNIGRAM: _ClassVar[TrainerSpec.ModelType]
        BPE: _ClassVar[TrainerSpec.ModelType]
        WORD: _ClassVar[TrainerSpec.ModelType]
        CHAR: _ClassVar[TrainerSpec.ModelType]
    UNIGRAM: TrainerSpec.ModelType
    BPE: TrainerSpec.ModelType
    WORD: TrainerSpec.ModelType
    CHAR: TrainerSpec.ModelType
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    TREAT_WHITESPACE_AS_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    BOS_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_ID_FIELD_NUMBER: _ClassVar[int]
    PAD_ID_FIELD_NUMBER: _ClassVar[int]
    model_type: TrainerSpec.ModelType
    treat_whitespace_as_suffix: bool
    bos_id: int
    eos_id: int
    pad_id: int
    def __init__(self, model_type: _Optional[_Union[TrainerSpec.ModelType, str]] = ..., treat_whitespace_as_suffix: _Optional[bool] = ..., bos_id: _Optional[int] = ..., eos_id: _Optional[int] = ..., pad_id: _Optional[int] = ...) -> None: ...

class NormalizerSpec(_message.Message):
    __slots__ = ("precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
    PRECOMPILED_CHARSMAP_FIELD_NUMBER: _ClassVar[int]
    ADD_DUMMY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    REMOVE_EXTRA_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
    ESCAPE_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    def __init__(self, precompiled_charsmap: _Optional[bytes] = ..., add_dummy_prefix: _Optional[bool] = ..., remove_extra_whitespaces: _Optional[bool] = ..., escape_whitespaces: _Optional[bool] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("pieces", "trainer_spec", "normalizer_spec")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_SPEC_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_SPEC_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    trainer_spec: TrainerSpec
    normalizer_spec: NormalizerSpec
    def __init__(self, pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., trainer_spec: _Optional[_Union[TrainerSpec, _Mapping]] = ..., normalizer_spec: _Optional[_Union[NormalizerSpec, _Mapping]] = ...) -> None: ...
