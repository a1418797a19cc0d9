package device_test

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/testbackend"
)

func TestMachineFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "machine.json")
	write := func(text string) string {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	m, err := device.LoadMachine(write(`{
		"devices": [{}, {"h2d_gbs": 12, "d2h_gbs": 12.5, "duplex_gbs": 11, "sms": 46, "uplink": 1, "memory_bytes": 1048576}],
		"uplink_gbs": [24], "peer": [[false, true], [true, false]], "drive": "stepped", "schedule": "random", "seed": 7}`))
	require.NoError(t, err)
	assert.Equal(t, device.Machine{
		Devices:   []device.MachineDevice{{}, {H2DGBs: 12, D2HGBs: 12.5, DuplexGBs: 11, SMs: 46, Uplink: 1, MemoryBytes: 1 << 20}},
		UplinkGBs: []float64{24}, Peer: [][]bool{{false, true}, {true, false}},
		Drive: device.Stepped, Schedule: device.Random, Seed: 7,
	}, m)

	// A machine written as JSON is read back as itself.
	def := device.DefaultMachine(3)
	text, err := json.Marshal(def)
	require.NoError(t, err)
	back, err := device.ParseMachine(text)
	require.NoError(t, err)
	assert.Equal(t, def, back)

	for text, want := range map[string]string{
		``:                                                  "ends inside",
		`{"devices":[{}]`:                                   "ends inside",
		`[]`:                                                "the machine is a array; allowed: an object",
		`{}`:                                                "devices is a list of 0; allowed: 1 to 16 devices",
		`{"devices":[]}`:                                    "devices is a list of 0",
		`{"devices":2}`:                                     "devices is a number; allowed: a list",
		`{"devices":[{}]} x`:                                "something follows",
		`{"devices":[{}],"links":3}`:                        `unknown field "links"`,
		`{"devices":[{"h2d":3}]}`:                           `unknown field "h2d"`,
		`{"devices":[{"h2d_gbs":"fast"}]}`:                  "devices.h2d_gbs is a string; allowed: a number",
		`{"devices":[{},{"h2d_gbs":-3}]}`:                   "devices[1].h2d_gbs is -3; allowed: 0 (default) or 0.001 to 1e+06",
		`{"devices":[{"sms":-1}]}`:                          "devices[0].sms is -1",
		`{"devices":[{"sms":1.5}]}`:                         "devices.sms is a number 1.5; allowed: a whole number in range",
		`{"devices":[{"uplink":1}]}`:                        "devices[0].uplink is 1; allowed: 0 (none) or 1 to 0",
		`{"devices":[{"memory_bytes":-1}]}`:                 "devices[0].memory_bytes",
		`{"devices":[{}],"uplink_gbs":[0]}`:                 "uplink_gbs[0] is 0",
		`{"devices":[{}],"copy_us":-1}`:                     "copy_us is -1",
		`{"devices":[{}],"peer":[[true,false]]}`:            "peer[0] is a list of 2; allowed: one entry per device",
		`{"devices":[{},{}],"peer":[[true,false]]}`:         "peer is a list of 1 rows",
		`{"devices":[{}],"drive":"fast"}`:                   `drive is "fast"; allowed: [background stepped]`,
		`{"devices":[{}],"schedule":"lifo"}`:                `schedule is "lifo"`,
		`{"devices":[{}],"seed":-1}`:                        "seed is a number -1",
		`{"devices":[{}],"host_gbs":1e9}`:                   "host_gbs is 1e+09",
		`{"devices":[{"cc_major":100}]}`:                    "devices[0].cc_major",
		"{\n \"devices\": [{]\n}":                           "line 2, column 15",
		`{"devices":[` + strings.Repeat("{},", 16) + `{}]}`: "devices is a list of 17",
	} {
		_, err := device.LoadMachine(write(text))
		require.ErrorIs(t, err, device.ErrArgument, text)
		assert.Contains(t, err.Error(), want, text)
		assert.Contains(t, err.Error(), path, text)
	}

	_, err = device.LoadMachine(path + ".none")
	require.ErrorIs(t, err, device.ErrArgument)
	require.ErrorIs(t, err, fs.ErrNotExist)
	assert.Contains(t, err.Error(), path+".none")
	_, err = device.LoadMachine(write(strings.Repeat(" ", 1<<20+1)))
	require.ErrorIs(t, err, device.ErrArgument)
	_, err = device.LoadMachine(t.TempDir())
	require.ErrorIs(t, err, device.ErrArgument)
}

func TestConfigure(t *testing.T) {
	m := device.DefaultMachine(3)
	m.Devices[2].MemoryBytes = 1 << 20
	m.Peer = [][]bool{{false, true, false}, {true, false, false}, {false, false, false}}
	testbackend.Emulated(t, m, func(t *testing.T, d device.Driver) {
		n, err := d.Count()
		require.NoError(t, err)
		assert.Equal(t, 3, n)
		can, err := d.CanAccessPeer(0, 1)
		require.NoError(t, err)
		assert.True(t, can)
		can, err = d.CanAccessPeer(0, 2)
		require.NoError(t, err)
		assert.False(t, can)
		info, err := d.Info(2)
		require.NoError(t, err)
		assert.Equal(t, int64(1<<20), info.MemoryBytes)
		assert.Equal(t, m, device.CurrentMachine())

		p, err := d.Malloc(2, 1<<19)
		require.NoError(t, err)
		_, err = d.Malloc(2, 1<<20)
		require.ErrorIs(t, err, device.ErrAlloc)
		assert.Equal(t, int64(1), device.LiveObjects())
		require.NoError(t, device.ConfigureOnce(m), "the same machine again")
		require.ErrorIs(t, device.ConfigureOnce(device.DefaultMachine(2)), device.ErrArgument, "something is allocated")
		require.ErrorIs(t, device.Configure(device.DefaultMachine(2), false), device.ErrArgument)
		require.ErrorIs(t, device.Configure(device.Machine{}, false), device.ErrArgument, "no device")
		require.NoError(t, d.Free(2, p))
		require.NoError(t, device.ConfigureOnce(device.DefaultMachine(2)))
		n, err = d.Count()
		require.NoError(t, err)
		assert.Equal(t, 2, n)
		_, err = d.Malloc(2, 16)
		require.ErrorIs(t, err, device.ErrNoDevice)
	})
}

func TestZeroFieldsAreDefaults(t *testing.T) {
	require.NoError(t, device.Configure(device.Machine{Devices: make([]device.MachineDevice, 2)}, true))
	assert.Equal(t, device.DefaultMachine(2), device.CurrentMachine())
	m := device.DefaultMachine(2)
	assert.Equal(t, 55.0, m.Devices[0].H2DGBs)
	assert.Equal(t, 48.0, m.Devices[1].DuplexGBs)
	assert.Zero(t, m.Devices[1].Uplink)
}

func TestSteering(t *testing.T) {
	m := device.DefaultMachine(1)
	m.Drive = device.Stepped
	testbackend.Emulated(t, m, func(t *testing.T, d device.Driver) {
		device.Fail(device.CallStreamCreate, 2)
		s, err := d.NewStream(0)
		require.NoError(t, err)
		_, err = d.NewStream(0)
		require.ErrorIs(t, err, device.ErrRuntime, "the second fails")
		p, err := d.Malloc(0, 1<<20)
		require.NoError(t, err)

		before := device.NowMicros()
		require.NoError(t, d.CopyAsync(0, p, p+1<<19, 1<<19, s))
		done, err := d.Query(0, s)
		require.NoError(t, err)
		_ = done
		require.NoError(t, d.Synchronize(0, s))
		assert.Greater(t, device.NowMicros(), before)

		orders := device.Orders()
		require.NotEmpty(t, orders)
		for i, o := range orders {
			assert.Equal(t, i+1, o.ID)
			assert.NotEmpty(t, o.Name)
			assert.NotEmpty(t, o.Text)
		}
		assert.Empty(t, device.Report())
		require.NoError(t, d.DestroyStream(0, s))
		require.NoError(t, d.Free(0, p))
	})
}
