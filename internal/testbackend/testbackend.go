// Package testbackend chooses the devices that this module's tests run on: emulated ones always, and real GPUs where the
// test binary holds the cuda backend and the machine has enough of them.
//
// AR_TEST_BACKEND narrows that: "emulated" leaves GPUs alone; "cuda" runs on GPUs only and turns every skip for want of
// GPUs into a failure.
package testbackend

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"gpu.example/allreduce/device"
)

// Each runs a test on every backend with at least so many devices, as a sub-test named after it. The emulated machine is
// a new one of that many devices each time, and must be empty afterwards.
func Each(t *testing.T, devices int, test func(t *testing.T, d device.Driver)) {
	t.Helper()
	choice := choice(t)
	if choice != "cuda" {
		t.Run("emulated", func(t *testing.T) { Emulated(t, device.DefaultMachine(devices), test) })
	}
	if choice != "emulated" {
		t.Run("cuda", func(t *testing.T) { CUDA(t, devices, test) })
	}
}

// Emulated runs a test on an emulated machine, which must be empty afterwards.
func Emulated(t *testing.T, m device.Machine, test func(t *testing.T, d device.Driver)) {
	t.Helper()
	if choice(t) == "cuda" {
		t.Skip("emulated devices only, and AR_TEST_BACKEND=cuda")
	}
	if err := device.Configure(m, true); err != nil {
		t.Fatal(err)
	}
	d, err := device.Open(device.Emulated)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		device.Fail(0, 0)
		// What a graph or a failed call still used at Close is freed by a thread, a little later.
		n := device.LiveObjects()
		for from := time.Now(); n != 0 && time.Since(from) < 3*time.Second; n = device.LiveObjects() {
			time.Sleep(5 * time.Millisecond)
		}
		if n != 0 && !t.Failed() {
			t.Errorf("%d allocations, streams, events or graphs of the emulated machine are still alive", n)
		}
	})
	test(t, d)
}

// CUDA runs a test on real GPUs, or says why not.
func CUDA(t *testing.T, devices int, test func(t *testing.T, d device.Driver)) {
	t.Helper()
	missing := func(format string, args ...any) {
		t.Helper()
		if choice(t) == "cuda" {
			t.Fatalf(format, args...)
		}
		t.Skipf(format, args...)
	}
	if choice(t) == "emulated" {
		t.Skip("GPUs only, and AR_TEST_BACKEND=emulated")
	}
	d, err := device.Open(device.CUDA)
	if err != nil {
		missing("needs %d GPUs: %v", devices, err)
	}
	n, err := d.Count()
	if err != nil {
		missing("needs %d GPUs: %v", devices, err)
	}
	if n < devices {
		missing("needs %d GPUs, this machine has %d", devices, n)
	}
	test(t, d)
}

func choice(t *testing.T) string {
	t.Helper()
	switch c := os.Getenv("AR_TEST_BACKEND"); c {
	case "", "emulated", "cuda":
		return c
	default:
		t.Fatalf("AR_TEST_BACKEND=%q is not allowed; allowed: emulated, cuda", c)
		return ""
	}
}

// Main is for TestMain: it says once if GPUs are left alone because the binary does not hold the cuda backend, and fails
// where goroutines are left over at the end.
func Main(m *testing.M) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil {
		if _, err := device.Open(device.CUDA); err != nil {
			fmt.Printf("GPUs of this machine were left alone: %v\n", err)
		}
	}
	goleak.VerifyTestMain(m)
}
