package device_test

import (
	"encoding/json"
	"errors"
	"testing"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testfuzz"
)

// Any text is refused in one line, or is a machine that can be made, written and read back as itself.
func FuzzParseMachine(f *testing.F) {
	for _, text := range []string{
		``, `{}`, `[]`, `null`, `{"devices":[{}]}`, `{"devices":[{}]} x`, `{"devices":[null]}`, `{"devices":[{},{"h2d_gbs":12,"sms":46,"uplink":1}],"uplink_gbs":[24]}`,
		`{"devices":[{"memory_bytes":-1}]}`, `{"devices":[{}],"peer":[[true]]}`, `{"devices":[{}],"drive":"stepped","schedule":"random","seed":7}`,
		`{"devices":[{}],"drive":"a\nb"}`, `{"devices":[{}],"a\u0000b":1}`, `{"devices":[{"cc_major":99}],"copy_us":1e-300}`, `{"devices":[{}],"seed":18446744073709551615}`,
		`{"DEVICES":[{}],"devices":[{},{}]}`,
	} {
		f.Add([]byte(text))
	}
	f.Cleanup(func() { _ = device.Configure(device.DefaultMachine(2), true) })
	f.Fuzz(func(t *testing.T, text []byte) {
		var m device.Machine
		var err error
		testfuzz.Bounded(t, len(text), func() { m, err = device.ParseMachine(text) })
		if err != nil {
			if !errors.Is(err, device.ErrArgument) {
				t.Fatalf("not ErrArgument: %v", err)
			}
			testfuzz.OneLine(t, err, len(text))
			return
		}
		written, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		back, err := device.ParseMachine(written)
		if err != nil {
			t.Fatalf("%s: %v", written, err)
		}
		if again, _ := json.Marshal(back); string(again) != string(written) {
			t.Fatalf("%s is read back as %s", written, again)
		}
		if err := device.Configure(m, true); err != nil {
			t.Fatalf("%s: %v", written, err)
		}
	})
}
