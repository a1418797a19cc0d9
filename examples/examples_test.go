// Package examples_test builds and runs every example on emulated devices.
package examples_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// output runs a program in the module's root. It skips where the program is not installed.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("no %s here", name)
	}
	if _, err := os.Stat("../go.mod"); err != nil {
		t.Skip("the sources are not here")
	}
	cmd := exec.Command(name, args...)
	cmd.Dir = ".."
	text, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %v\n%s", name, args, text)
	return string(text)
}

func TestInProcess(t *testing.T) {
	text := output(t, "go", append(append([]string{"run"}, tags...), "./examples/inprocess")...)
	require.Contains(t, text, "5120 elements: every rank has 3 everywhere. internal")
	require.Contains(t, text, "1048576 elements: every rank has 3 everywhere. copy-engine")
}

func TestGraph(t *testing.T) {
	text := output(t, "go", append(append([]string{"run"}, tags...), "./examples/graph")...)
	require.Contains(t, text, "3 replays: every rank has 4096 everywhere")
}

// One process per rank, with the variables that a launcher sets; under torchrun and mpirun themselves where they are here.
func TestProcesses(t *testing.T) {
	program := filepath.Join(t.TempDir(), "processes")
	output(t, "go", append(append([]string{"build", "-o", program}, tags...), "./examples/processes")...)
	check := func(t *testing.T, text string) {
		for _, part := range []string{"rank 0 of 2: 5120 elements are 3 everywhere. internal", "rank 1 of 2: 1048576 elements are 3 everywhere. copy-engine"} {
			require.Contains(t, text, part)
		}
	}
	t.Run("variables", func(t *testing.T) {
		script := "for r in 0 1; do RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r LOCAL_WORLD_SIZE=2 GGML_CUDA_AR_RENDEZVOUS=example$$ " + program + " & done; wait"
		check(t, output(t, "sh", "-c", script))
	})
	t.Run("torchrun", func(t *testing.T) {
		check(t, output(t, "torchrun", "--no-python", "--nproc-per-node", "2", program))
	})
	t.Run("mpirun", func(t *testing.T) {
		check(t, output(t, "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", program))
	})
}

// The C example as its head says, with nothing but compilers (-O0: that compiles in a quarter of the time). CMake builds it against the libraries.
func TestC(t *testing.T) {
	folder := t.TempDir()
	core, object, program := filepath.Join(folder, "core.o"), filepath.Join(folder, "example.o"), filepath.Join(folder, "example")
	output(t, "gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-Icsrc/include", "-c", "examples/c/allreduce.c", "-o", object)
	output(t, "g++", "-std=c++17", "-O0", "-ffp-contract=off", "-pthread", "-Icsrc", "-Icsrc/include", "-c", "internal/core/core_emulated.cpp", "-o", core)
	output(t, "g++", object, core, "-pthread", "-o", program)
	text := output(t, program)
	require.Contains(t, text, "5120 elements by internal, wire f32: 0 wrong")
	require.Contains(t, text, "1048576 elements by copy-engine, wire bf16: 0 wrong")
}
