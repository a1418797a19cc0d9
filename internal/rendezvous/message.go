//go:build linux

package rendezvous

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"unicode/utf8"
)

// The wire: a header of 12 bytes (kind, 3 zeroes, sequence, length) and the payload, little-endian. The length is checked
// against what the reader would take before any of the payload is read.
const headerBytes = 12

const (
	kindHello     byte = 1 // other -> 0: hello, JSON
	kindWelcome   byte = 2 // 0 -> other: all are there
	kindRefuse    byte = 3 // 0 -> other: you are no rank of this group; text
	kindMismatch  byte = 4 // 0 -> other: ranks differ, nobody starts; text
	kindGather    byte = 5 // other -> 0: a blob
	kindResult    byte = 6 // 0 -> other: blobs of all, or rank 0's
	kindAbort     byte = 7 // the group is over; text
	kindBye       byte = 8 // a rank leaves in peace
	kindChallenge byte = 9 // TCP: secure.go
	kindProof     byte = 10
	kindAccept    byte = 11
	kindMissing   byte = 12 // 0 -> other: ranks did not come; sequence: which, plus one, if it is one; text
	lastKind           = kindMissing
)

var errGarbage = errors.New("rendezvous: not our protocol")

type message struct {
	kind     byte
	sequence uint32
	payload  []byte
	files    []*os.File
}

func (m *message) closeFiles() {
	for _, f := range m.files {
		_ = f.Close()
	}
	m.files = nil
}

// text is the payload as words for people.
func (m *message) text() string {
	text := string(clip(string(m.payload)))
	if text == "" || !utf8.ValidString(text) {
		return "no reason given"
	}
	return text
}

// clip bounds a text that is sent or was received.
func clip(text string) []byte {
	if len(text) > maxText {
		text = text[:maxText]
		for !utf8.ValidString(text) && len(text) > maxText-utf8.UTFMax {
			text = text[:len(text)-1]
		}
	}
	return []byte(text)
}

func putHeader(m message, length int) []byte {
	var h [headerBytes]byte
	h[0] = m.kind
	binary.LittleEndian.PutUint32(h[4:], m.sequence)
	binary.LittleEndian.PutUint32(h[8:], uint32(length))
	return h[:]
}

// parseHeader reads a header and checks the length.
func parseHeader(h []byte, limit int) (m message, length int, err error) {
	if len(h) != headerBytes || h[0] == 0 || h[0] > lastKind || h[1] != 0 || h[2] != 0 || h[3] != 0 {
		return m, 0, errGarbage
	}
	m.kind = h[0]
	m.sequence = binary.LittleEndian.Uint32(h[4:])
	n := binary.LittleEndian.Uint32(h[8:])
	if int64(n) > int64(limit) {
		return m, 0, fmt.Errorf("%w: a message of %d bytes, allowed are %d", errGarbage, n, limit)
	}
	return m, int(n), nil
}

// hello is how a rank introduces itself.
type hello struct {
	Rank   int
	World  int
	PID    int
	Fields []Field
}

func parseHello(payload []byte) (h hello, err error) {
	if len(payload) > maxHello {
		return h, errGarbage
	}
	if err := json.Unmarshal(payload, &h); err != nil {
		return h, fmt.Errorf("%w: %w", errGarbage, err)
	}
	return h, nil
}

// joinBlobs and splitBlobs: each blob behind its length.
func joinBlobs(blobs [][]byte) []byte {
	var all []byte
	for _, b := range blobs {
		all = binary.LittleEndian.AppendUint32(all, uint32(len(b)))
		all = append(all, b...)
	}
	return all
}

func splitBlobs(all []byte, n int) ([][]byte, error) {
	blobs := make([][]byte, n)
	for i := range blobs {
		if len(all) < 4 {
			return nil, errGarbage
		}
		length := binary.LittleEndian.Uint32(all)
		all = all[4:]
		if int64(length) > int64(len(all)) {
			return nil, errGarbage
		}
		blobs[i] = all[:length:length]
		all = all[length:]
	}
	if len(all) != 0 {
		return nil, errGarbage
	}
	return blobs, nil
}
