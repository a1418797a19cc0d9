//go:build cgo && linux && (amd64 || arm64) && !cuda

package core

// The emulated backend alone, compiled by cgo from csrc (core_emulated.cpp). CMake's -ffp-contract=off is not among the
// flags that cgo takes from a package; the kernels have no product that a sum could be fused with (adds and one division).

// #cgo CPPFLAGS: -I${SRCDIR}/../../csrc -I${SRCDIR}/../../csrc/include
// #cgo CXXFLAGS: -std=c++17 -O2 -fvisibility=hidden -pthread
// #cgo LDFLAGS: -pthread
import "C"
