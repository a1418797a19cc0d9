//go:build linux

package rendezvous

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// TCP. Both sides prove that they know the secret before anything else is said:
//
//	0 -> other  challenge: 32 random bytes
//	other -> 0  proof: 32 random bytes, HMAC(secret, "client" + hash of all bytes so far)
//	0 -> other  accept: HMAC(secret, "server" + hash of all bytes so far)
//
// Every later message is sealed with AES-256-GCM under a key per direction, derived from the secret and that hash, its
// header authenticated and its number the nonce. So a recorded byte is worth nothing in another connection, nor twice in the
// same one, and nothing (NCCL's id, for one) can be read on the way. There is no forward secrecy: a secret is for one job.
const (
	minSecret  = 16
	maxSecret  = 4096
	nonceBytes = 32
	macBytes   = sha256.Size
	sealBytes  = 16
)

var errSecretDiffers = errors.New("rendezvous: the secrets differ")

// ReadSecret reads the file of a shared secret: this user's alone (mode 0600 or less), 16 to 4096 bytes, a line end not
// counted.
func ReadSecret(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%s is no regular file", path)
	case int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("%s belongs to user %d, not to this process's user %d", path, st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		return nil, fmt.Errorf("%s can be read or written by others (mode %04o); allowed: 0600 or less", path, st.Mode&0o777)
	}
	secret, err := io.ReadAll(io.LimitReader(f, maxSecret+2))
	if err != nil {
		return nil, err
	}
	for len(secret) > 0 && (secret[len(secret)-1] == '\n' || secret[len(secret)-1] == '\r') {
		secret = secret[:len(secret)-1]
	}
	if len(secret) < minSecret || len(secret) > maxSecret {
		return nil, fmt.Errorf("%s holds %d bytes; allowed: %d to %d", path, len(secret), minSecret, maxSecret)
	}
	return secret, nil
}

// tcpLink seals and opens once the keys are there.
type tcpLink struct {
	conn       net.Conn
	transcript hash.Hash
	mutex      sync.Mutex // of sends
	out, in    cipher.AEAD
	sent, got  uint64
}

func newTCPLink(conn net.Conn) *tcpLink { return &tcpLink{conn: conn, transcript: sha256.New()} }

func (l *tcpLink) deadline(t time.Time) { _ = l.conn.SetReadDeadline(t) }
func (l *tcpLink) close()               { _ = l.conn.Close() }
func (l *tcpLink) ended() bool          { return connEnded(l.conn.(*net.TCPConn)) }

func nonceOf(n uint64) []byte {
	var nonce [12]byte
	binary.LittleEndian.PutUint64(nonce[4:], n)
	return nonce[:]
}

func (l *tcpLink) send(m message, deadline time.Time) error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if len(m.files) > 0 {
		return errors.New("rendezvous: descriptors cannot leave the host")
	}
	if err := l.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	var packet []byte
	if l.out == nil {
		packet = append(putHeader(m, len(m.payload)), m.payload...)
		l.transcript.Write(packet)
	} else {
		header := putHeader(m, len(m.payload)+sealBytes)
		packet = l.out.Seal(header, nonceOf(l.sent), m.payload, header)
		l.sent++
	}
	_, err := l.conn.Write(packet)
	return err
}

func (l *tcpLink) receive(limit int) (message, error) {
	if l.in != nil {
		limit += sealBytes
	}
	header := make([]byte, headerBytes)
	if _, err := io.ReadFull(l.conn, header); err != nil {
		return message{}, err
	}
	m, length, err := parseHeader(header, limit)
	if err != nil {
		return message{}, err
	}
	m.payload = make([]byte, length)
	if _, err := io.ReadFull(l.conn, m.payload); err != nil {
		return message{}, err
	}
	if l.in == nil {
		l.transcript.Write(header)
		l.transcript.Write(m.payload)
		return m, nil
	}
	m.payload, err = l.in.Open(m.payload[:0], nonceOf(l.got), m.payload, header)
	l.got++
	if err != nil {
		return message{}, fmt.Errorf("%w: a message that was changed, repeated or left out", errGarbage)
	}
	return m, nil
}

func (l *tcpLink) mac(secret []byte, role string) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("allreduce rendezvous 1 " + role))
	h.Write(l.transcript.Sum(nil))
	return h.Sum(nil)
}

func (l *tcpLink) keys(secret []byte, outgoing, incoming string) error {
	seen := l.transcript.Sum(nil)
	aead := func(role string) (cipher.AEAD, error) {
		key, err := hkdf.Key(sha256.New, secret, seen, "allreduce rendezvous 1 from "+role, 32)
		if err != nil {
			return nil, err
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, err
		}
		return cipher.NewGCM(block)
	}
	out, err := aead(outgoing)
	if err != nil {
		return err
	}
	in, err := aead(incoming)
	l.out, l.in = out, in
	return err
}

// challenge is rank 0's side of the proof.
func (l *tcpLink) challenge(secret []byte, deadline time.Time) error {
	l.deadline(deadline)
	nonce := make([]byte, nonceBytes)
	_, _ = rand.Read(nonce) // never fails
	if err := l.send(message{kind: kindChallenge, payload: nonce}, deadline); err != nil {
		return err
	}
	header := make([]byte, headerBytes)
	if _, err := io.ReadFull(l.conn, header); err != nil {
		return err
	}
	m, length, err := parseHeader(header, nonceBytes+macBytes)
	if err != nil || m.kind != kindProof || length != nonceBytes+macBytes {
		return errGarbage
	}
	proof := make([]byte, length)
	if _, err := io.ReadFull(l.conn, proof); err != nil {
		return err
	}
	l.transcript.Write(header)
	l.transcript.Write(proof[:nonceBytes])
	if !hmac.Equal(proof[nonceBytes:], l.mac(secret, "client")) {
		_ = l.send(message{kind: kindRefuse, payload: []byte("the secret is not rank 0's")}, deadline)
		return errSecretDiffers
	}
	l.transcript.Write(proof[nonceBytes:])
	if err := l.send(message{kind: kindAccept, payload: l.mac(secret, "server")}, deadline); err != nil {
		return err
	}
	return l.keys(secret, "server", "client")
}

// prove is the other side.
func (l *tcpLink) prove(secret []byte, deadline time.Time) error {
	l.deadline(deadline)
	m, err := l.receive(nonceBytes)
	if err != nil {
		return err
	}
	if m.kind != kindChallenge || len(m.payload) != nonceBytes {
		return errGarbage
	}
	nonce := make([]byte, nonceBytes)
	_, _ = rand.Read(nonce)
	proof := message{kind: kindProof}
	header := putHeader(proof, nonceBytes+macBytes)
	l.transcript.Write(header)
	l.transcript.Write(nonce)
	mac := l.mac(secret, "client")
	l.transcript.Write(mac)
	if err := l.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	if _, err := l.conn.Write(append(append(header, nonce...), mac...)); err != nil {
		return err
	}
	expected := l.mac(secret, "server")
	m, err = l.receive(maxText)
	switch {
	case err != nil:
		return err
	case m.kind == kindRefuse:
		return errSecretDiffers
	case m.kind != kindAccept:
		return errGarbage
	case !hmac.Equal(m.payload, expected):
		return errSecretDiffers
	}
	return l.keys(secret, "client", "server")
}
