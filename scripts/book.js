// An option stays on one line of the book: "--" alone at a line's end says nothing.
for (const code of document.querySelectorAll(".content :not(pre) > code")) {
    code.innerHTML = code.innerHTML.replace(/--[\w-]+/g, '<span class="option">$&</span>');
}
for (const cell of document.querySelectorAll(".content td")) {
    cell.classList.toggle("long", cell.textContent.length > 80);
}
