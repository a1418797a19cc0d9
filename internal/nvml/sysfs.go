package nvml

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

var busName = regexp.MustCompile(`^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// link is what a PCI function's link can do; 0 is unknown.
type link struct{ gen, width int }

// sysfsLinks reads what the card can do, and the narrowest of the ports above it up to the root. Every port on the way
// has the same two files; what is missing or unknown does not count.
func sysfsLinks(root, busID string) (card, slot link) {
	if root == "" {
		root = "/sys"
	}
	path, err := filepath.EvalSymlinks(filepath.Join(root, "bus/pci/devices", busID))
	if err != nil {
		return link{}, link{}
	}
	card = readLink(path)
	for path = filepath.Dir(path); busName.MatchString(filepath.Base(path)); path = filepath.Dir(path) {
		port := readLink(path)
		slot = link{leastKnown(slot.gen, port.gen), leastKnown(slot.width, port.width)}
	}
	return card, slot
}

func readLink(path string) link {
	width, err := strconv.Atoi(readWord(filepath.Join(path, "max_link_width")))
	if err != nil || width < 0 || width >= 255 { // 255: the kernel could not tell
		width = 0
	}
	return link{generation(readWord(filepath.Join(path, "max_link_speed"))), width}
}

// readWord gives a file's first word: "16.0" of "16.0 GT/s PCIe", as new kernels write it, or of "16 GT/s", as old ones.
func readWord(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	word, _, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	return word
}

// generation maps a signalling rate in GT/s, 0 where it is none ("Unknown").
func generation(rate string) int {
	value, err := strconv.ParseFloat(rate, 64)
	if err != nil {
		return 0
	}
	for i, known := range []float64{2.5, 5, 8, 16, 32, 64, 128} {
		if value == known {
			return i + 1
		}
	}
	return 0
}
