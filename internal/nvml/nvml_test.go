package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestNormalBusID(t *testing.T) {
	for id, want := range map[string]string{
		"00000000:17:00.0": "0000:17:00.0", "0000:AF:00.0": "0000:af:00.0", "00010000:01:02.3": "10000:01:02.3", "17:00.0": "0000:17:00.0",
		"0000:17:00.0": "0000:17:00.0", "Not:A:Bus": "not:a:bus", "": "", "0000:17:00": "0000:17:00", "1:2:3:4.0": "1:2:3:4.0",
	} {
		assert.Equal(t, want, NormalBusID(id), id)
	}
}

func TestLinkGBs(t *testing.T) {
	assert.InDelta(t, 46.9, LinkGBs(5, 16), 0.05, "the figure the emulated machine and the H200 share")
	assert.InDelta(t, 22.4, LinkGBs(4, 16), 0.05)
	assert.InDelta(t, 2.8, LinkGBs(3, 4), 0.05, "2.8 both ways were measured on a 3.0 x4 link")
	assert.Equal(t, LinkGBs(6, 1), LinkGBs(7, 1))
	for gen := 1; gen <= 5; gen++ {
		assert.Greater(t, LinkGBs(gen+1, 8), LinkGBs(gen, 8))
	}
	assert.Zero(t, LinkGBs(0, 16))
	assert.Zero(t, LinkGBs(5, 0))
	assert.Zero(t, LinkGBs(-1, -1))
}

func TestMaxLink(t *testing.T) {
	gen, width := (&Device{CardGen: 5, LinkGen: 4, SlotGen: 3, CardWidth: 16, LinkWidth: 16, SlotWidth: 4}).MaxLink()
	assert.Equal(t, [2]int{3, 4}, [2]int{gen, width})
	gen, width = (&Device{LinkGen: 4}).MaxLink()
	assert.Equal(t, [2]int{4, 0}, [2]int{gen, width})
}

// machine writes a sysfs with a card behind a switch: root port, upstream port, downstream port, card.
func machine(t *testing.T) string {
	root := t.TempDir()
	path := filepath.Join(root, "devices", "pci0000:16")
	for _, hop := range []struct{ id, speed, width string }{
		{"0000:16:01.0", "32.0 GT/s PCIe", "8"}, {"0000:17:00.0", "16 GT/s", "16"}, {"0000:18:00.0", "Unknown", "255"}, {"0000:19:00.0", "32.0 GT/s PCIe", "16"},
	} {
		path = filepath.Join(path, hop.id)
		require.NoError(t, os.MkdirAll(path, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(path, "max_link_speed"), []byte(hop.speed+"\n"), 0o644))
		require.NoError(t, os.WriteFile(filepath.Join(path, "max_link_width"), []byte(hop.width+"\n"), 0o644))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(root, "bus/pci/devices"), 0o755))
	require.NoError(t, os.Symlink("../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0",
		filepath.Join(root, "bus/pci/devices/0000:19:00.0")))
	return root
}

func TestSysfs(t *testing.T) {
	root := machine(t)
	card, slot := sysfsLinks(root, "0000:19:00.0")
	assert.Equal(t, link{5, 16}, card)
	assert.Equal(t, link{4, 8}, slot, "the narrowest hop; what is unknown does not count")
	card, slot = sysfsLinks(root, "0000:20:00.0")
	assert.Zero(t, card)
	assert.Zero(t, slot)
	for text, want := range map[string]int{"2.5": 1, "5.0": 2, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6, "Unknown": 0, "": 0, "17": 0} {
		assert.Equal(t, want, generation(text), text)
	}
}

func TestStatus(t *testing.T) {
	for status, want := range map[Status]string{Unasked: "-", OK: "OK", ChipsetNotSupported: "CNS", GPUNotSupported: "GNS",
		TopologyNotSupported: "TNS", DisabledByRegistry: "DR", NotSupported: "NS", Unknown: "U", -1: "U", 50: "U"} {
		assert.Equal(t, want, status.String())
	}
}

// On any machine: an answer, or the typed error; never a crash. Twice, since the library is unloaded in between.
func TestQueryHere(t *testing.T) {
	for range 2 {
		info, err := Query(Options{})
		if err != nil {
			require.True(t, errors.Is(err, ErrNotAvailable), "%v", err)
			t.Log(err)
			continue
		}
		t.Logf("driver %s", info.Driver)
		for i, d := range info.Devices {
			gen, width := d.MaxLink()
			t.Logf("%+v: Gen%d x%d, %.1f GB/s, P2P %v", d, gen, width, LinkGBs(gen, width), info.P2P[i])
			require.NotEmpty(t, d.UUID)
			require.NotNil(t, info.ByBusID(d.BusID))
		}
	}
}
