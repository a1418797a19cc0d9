//go:build cgo && linux && (amd64 || arm64) && !cuda

// The one place where cgo compiles the C core: every other file of csrc comes in from here. Go's build cache does not
// watch included files of other folders; `make` passes -DAR_SOURCE_HASH so that an edit is seen (CONTRIBUTING.md).
#define AR_WITH_CUDA 0
// cgo refuses -ffp-contract=off; a contracted multiply-add would round once where CUDA's build rounds twice.
#pragma GCC optimize("-ffp-contract=off")
#include "../../csrc/all_emulated.cpp"
#include "../../csrc/api.cpp"
